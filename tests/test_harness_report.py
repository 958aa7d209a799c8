"""Tables, flags and pictures of small results made by hand."""

import dataclasses
from types import SimpleNamespace

import pytest

from benchmarks.harness.curves import draw_curves
from benchmarks.harness.metrics import METRICS, metric
from benchmarks.harness.report import print_summary, render, scale_of
from benchmarks.harness.results import BenchmarkResult, Flag, Measurement, exact_count, summarise_values

PROVENANCE = {
    "model": "tiny",
    "weights": "random, seed 0",
    "dtype": "float32",
    "attention": "sdpa",
    "device": "cpu",
    "device_name": None,
    "cpu": "A Processor",
    "num_threads": 2,
    "load_average": [0.5, 0.4, 0.3],
    "commit": "c0ffee",
    "source_sha256": "0123456789abcdef",
    "package": "/somewhere/nanoserve",
}


def result(*measurements, case="", params=None, **changes):
    fields = {"benchmark": "bench_x.py::test_growth", "provenance": PROVENANCE} | changes
    return BenchmarkResult(case=case, params=params or {}, measurements=measurements, **fields)


def values(name, *samples, arm="cached"):
    return summarise_values(metric(name), arm, samples)


def measurement(value, low, high, name="ttft_s"):
    return Measurement(
        metric=metric(name), arm="cached", value=value, samples=(), num_observations=9, low=low, high=high
    )


def spread(name, centre, arm="cached"):
    """Six samples around a centre."""
    return values(name, *(centre * (1 + step / 50) for step in (-3, -2, -1, 1, 2, 3)), arm=arm)


# Numbers.


@pytest.mark.parametrize(
    ("seconds", "heading", "cell"),
    [(2.5, "TTFT (s,", "2.5"), (0.0123, "TTFT (ms,", "12.3"), (4.56e-5, "TTFT (us,", "45.6"), (0.4567, "(ms,", "457")],
)
def test_seconds_are_shown_in_the_unit_that_reads_best(seconds, heading, cell):
    text = render([result(values("ttft_s", *[seconds] * 6))])
    assert heading in text
    assert f"{cell} [{cell} .. {cell}]" in text


def test_one_quantity_has_one_unit_in_all_its_rows_and_no_exponent():
    text = render([result(values("e2e_s", *[s] * 6), case=str(s)) for s in (0.00004, 0.002, 3.0)])
    assert "E2E (s, lower is better)" in text
    for number in ("0.00004", "0.002", "3"):
        assert f"{number} [{number} .. {number}]" in text


def test_only_seconds_are_scaled():
    text = render([result(values("decode_tokens_per_s", *[0.05] * 6), values("speedup", *[4.0] * 6))])
    assert "Decode rate (tokens/s, higher is better)" in text
    assert "0.05 [0.05 .. 0.05]" in text
    assert "Speedup (x, higher is better)" in text
    assert scale_of(metric("ttft_s"), []) == ("s", 1.0)


def test_what_is_not_known_is_said():
    text = render(
        [
            result(values("ttft_s", 0.001, 0.002), case="few"),
            result(values("ttft_s"), case="none"),
            result(measurement(0.005, None, 0.007), case="no-lower-bound"),
            result(measurement(0.005, 0.004, None), case="no-upper-bound"),
        ]
    )
    assert "1.5 (n too small)" in row(text, "few")
    assert "undefined" in row(text, "none")
    assert "5 (too few runs)" in row(text, "no-lower-bound")
    assert "5 (too few runs)" in row(text, "no-upper-bound")


def row(text, case):
    return next(line for line in text.splitlines() if f"growth[{case}]" in line)


def test_a_row_holds_n_and_a_cell_per_arm():
    text = render([result(spread("ttft_s", 0.01), spread("ttft_s", 0.02, arm="naive"), case="16")])
    header = next(line for line in text.splitlines() if "benchmark" in line and "cached" in line)
    assert header.split() == ["benchmark", "n", "cached", "naive"]
    assert " ".join(row(text, "16").split()) == "growth[16] 6 10 [9.47 .. 10.5] 20 [18.9 .. 21.1]"


def test_an_arm_that_a_case_lacks_is_an_empty_cell():
    text = render([result(spread("ttft_s", 0.01), case="a"), result(spread("ttft_s", 0.02, arm="naive"), case="b")])
    assert " ".join(row(text, "b").split()) == "growth[b] 6 20 [18.9 .. 21.1]"


def test_quantities_come_in_the_order_of_their_declaration():
    sampled = [each for each in METRICS.values() if not each.is_exact]
    text = render([result(*(spread(each.name, 0.01) for each in reversed(sampled)))])
    units = [each.shown_in or ("ms" if each.unit == "s" else each.unit) for each in sampled]
    places = [text.index(f"{each.title} ({unit}") for each, unit in zip(sampled, units, strict=True)]
    assert places == sorted(places)


def test_a_coefficient_below_zero_is_told_like_any_other():
    text = render([result(values("ttft_per_token2_s", *[-2e-6] * 6))])
    assert "TTFT per token squared (us, lower is better)" in text
    assert "-2 [-2 .. -2]" in text


def test_counts_stand_in_a_table_of_their_own_to_the_last_digit():
    counts = [
        exact_count(metric(name), arm, value)
        for arm, factor in (("cached", 1), ("naive", 1000))
        for name, value in {"flops": 221_696 * factor, "num_tokens_recomputed": 0}.items()
    ]
    lines = render([result(*counts)]).splitlines()
    start = next(i for i, line in enumerate(lines) if "work, counted exactly (lower is better)" in line)
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["count", "cached", "naive"],
        ["FLOPs", "221,696", "221,696,000"],
        ["Tokens", "recomputed", "0", "0"],
    ]


def test_what_is_not_to_be_trusted_is_said():
    flags = (
        Flag(kind="drift", arm="cached", what="the last third is 9 % slower"),
        Flag(kind="contaminated", arm="", what="busy"),
    )
    text = render([result(spread("ttft_s", 0.01), case="16", flags=flags)])
    assert "! drift: growth[16] cached: the last third is 9 % slower" in text
    assert "! contaminated: growth[16]: busy" in text


def test_the_instrument_says_what_it_cost_and_what_its_control_saw():
    stopwatch = {
        "resolution_ns": 40,
        "stamp_ns": 281.4,
        "cost_s": {"cached": 9e-6, "naive": 9e-6},
        "share_of_run": {"cached": 0.0001, "naive": 0.00002},
    }
    control = {"median_s": 0.0022, "state": "clean", "num_clean": 7, "notes": ["the band has moved"]}
    watched = {"stopwatch": stopwatch, "control": control}
    told = PROVENANCE | watched
    text = render([result(spread("ttft_s", 0.01), provenance=told, runs={"cached": ()})])
    assert "instrument: 281 ns a stamp, at most 9 us or 0.01 % of a run; the clock resolves 40 ns" in text
    assert "control kernel: median 2.20 ms, clean (undisturbed passes known: 7; 3 make a band)" in text
    assert "note: the band has moved" in text


def test_what_was_paid_once_is_told_where_anything_was():
    paid = {"num_compilations": 2, "compile_s": 1.5, "num_captures": 0, "capture_s": 0.0}
    once = result(spread("ttft_s", 0.01), details={"warm_up": {"num_runs": 3, **paid}})
    assert "paid once: 4 compilations (3 s) in warm-up" in render([once, once])
    assert "paid once" not in render([result(spread("ttft_s", 0.01), details={"warm_up": {"num_runs": 3}})])


# Words.


def test_the_result_says_what_was_measured():
    text = render([result(spread("ttft_s", 0.01))])
    for words in ("model tiny (random, seed 0), float32, sdpa", "on cpu: A Processor, 2 threads, load 0.50"):
        assert words in text
    assert "nanoserve at c0ffee, source 0123456789ab, from /somewhere/nanoserve" in text
    assert "value [95 % interval" in text


def test_a_gpu_has_its_own_name():
    told = PROVENANCE | {"device": "cuda:0", "device_name": "A GPU"}
    assert "on cuda:0: A GPU" in render([result(spread("ttft_s", 0.01), provenance=told)])


@pytest.mark.parametrize("case", ["a[b]-é/,x", "[bold]", "[/]", "[red]x[/red]", "\\", "a\\[b]", "模型", ":smile:"])
def test_an_odd_case_name_is_shown_as_it_is(case):
    flags = (Flag(kind="drift", arm="", what="a [flag] of its own"),)
    text = render([result(spread("ttft_s", 0.01), case=case, flags=flags)])
    assert f"growth[{case}]" in text.splitlines()[2]
    assert f"! drift: growth[{case}]: a [flag] of its own" in text


def test_odd_words_in_the_provenance_are_shown_as_they_are():
    told = PROVENANCE | {"model": "/models/[x]/a", "package": "/tmp/[y]/nanoserve", "cpu": "[/] CPU"}
    text = render([result(spread("ttft_s", 0.01, arm="[arm]"), provenance=told)])
    for words in ("model /models/[x]/a (", "from /tmp/[y]/nanoserve", "on cpu: [/] CPU,", "[arm]"):
        assert words in text


def test_no_colour_unless_asked():
    results = [result(spread("ttft_s", 0.01))]
    assert "\x1b" not in render(results)
    assert "\x1b" in render(results, colour=True)


@dataclasses.dataclass
class Terminal:
    """What the report needs of pytest's terminal."""

    isatty: bool = False
    text: str = ""

    def section(self, title, sep):
        self.text += f"{sep} {title}\n"

    def write(self, text):
        self.text += text

    def write_line(self, line):
        self.text += f"{line}\n"


def test_the_summary_names_the_curves_that_it_drew(tmp_path):
    terminal = Terminal()
    print_summary(sweep(), tmp_path, terminal)
    assert "TTFT (ms" in terminal.text
    assert f"curve: {tmp_path / 'bench_x-test_growth.png'}" in terminal.text


# Pictures.


def sweep(axis="new_tokens", at=(8, 16, 32), **others):
    return [
        result(
            *(spread(name, 0.001 * number, arm=arm) for name in ("ttft_s", "e2e_s") for arm in ("cached", "naive")),
            spread("speedup", 1 + number / 8, arm="cached over naive"),
            case=f"{x}",
            params={axis: x} | others,
        )
        for number, x in enumerate(at, start=1)
    ]


def drawn(results, folder):
    paths = list(draw_curves(results, folder))
    assert all(path.stat().st_size > 1000 for path in paths)
    return sorted(path.name for path in paths)


def test_a_sweep_is_drawn_as_svg_and_png(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    assert drawn(sweep(), folder) == ["bench_x-test_growth.png", "bench_x-test_growth.svg"]
    assert (folder / "bench_x-test_growth.png").read_bytes().startswith(b"\x89PNG")
    svg = (folder / "bench_x-test_growth.svg").read_text()
    assert "<svg" in svg
    assert {"TTFT", "E2E", "Speedup"} <= {each.title for each in METRICS.values() if f"<!-- {each.title}," in svg}


@pytest.mark.parametrize("at", [(True, False), ("a", "b"), (8, "b"), (8, None), ([8], [16]), (8,), (8, 8)])
def test_without_a_number_that_varies_nothing_is_drawn(tmp_path, at):
    assert drawn(sweep(at=at), tmp_path) == []


def test_without_parameters_nothing_is_drawn(tmp_path):
    assert drawn([result(spread("ttft_s", 0.01))], tmp_path) == []


def test_a_benchmark_of_ungated_quantities_only_is_not_drawn(tmp_path):
    results = [result(spread("tpot_s", 0.01), params={"n": n}) for n in (1, 2)]
    assert drawn(results, tmp_path) == []


def test_undefined_numbers_and_open_intervals_are_drawn_around(tmp_path):
    results = [
        result(values("ttft_s"), params={"n": 1}),
        result(values("ttft_s", 0.001), params={"n": 2}),
        result(spread("ttft_s", 0.002), params={"n": 3}),
    ]
    assert len(drawn(results, tmp_path)) == 2


def test_arms_and_other_parameters_are_lines_of_their_own(tmp_path):
    """Eight lines: more than there are colours."""
    results = [each for dtype in ("bf16", "fp16", "fp32", "fp64") for each in sweep(dtype=dtype)]
    drawn(results, tmp_path)
    svg = (tmp_path / "bench_x-test_growth.svg").read_text()
    for dtype in ("bf16", "fp16", "fp32", "fp64"):
        assert f"<!-- cached, dtype={dtype} -->" in svg
        assert f"<!-- naive, dtype={dtype} -->" in svg


@pytest.mark.slow
def test_each_benchmark_has_its_own_picture(tmp_path):
    others = [dataclasses.replace(each, benchmark="sub/bench_y.py::test_growth") for each in sweep()]
    assert drawn(sweep() + others, tmp_path) == [
        "bench_x-test_growth.png", "bench_x-test_growth.svg",
        "sub-bench_y-test_growth.png", "sub-bench_y-test_growth.svg",
    ]  # fmt: skip


def test_a_folder_that_takes_no_curves_ends_nothing(tmp_path):
    (tmp_path / "curves").touch()
    written = []
    terminal = SimpleNamespace(
        section=lambda *_, **__: None, write=written.append, write_line=written.append, isatty=False
    )
    sweep = [result(spread("ttft_s", 0.01 * n), case=str(n), params={"n": n}) for n in (1, 2, 3)]
    print_summary(sweep, tmp_path / "curves", terminal)
    assert "the curves could not be written: " in written[-1]
