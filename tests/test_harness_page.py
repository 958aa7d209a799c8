"""The page, the CSV and the Markdown of small results made by hand, and the command that writes them."""

import csv
import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sample_results import BENCHMARK, PROVENANCE, streamed_case, sweep, write
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness import exports
from benchmarks.harness.archive import read_archives
from benchmarks.harness.doubts import doubts
from benchmarks.harness.errors import ArchiveError
from benchmarks.harness.exports import csv_text, markdown_text, write_files, write_report
from benchmarks.harness.page import label_results, render_page
from benchmarks.harness.results import Flag

UNKNOWN, DIRTY = PROVENANCE | {"commit": None}, PROVENANCE | {"commit": "c" * 40 + "+dirty"}
HOSTILE = (
    "<script>alert(1)</script>", '"onload="x', "a|b`c`", "{{ 7 * 7 }}", "$x^$", "x" * 400, "模型-é", "", "@all #1",
    "]]>-->", "\ud800", "\x1b[31m", "a\nb",
)  # fmt: skip


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return read_archives([write(tmp_path_factory.mktemp("one") / "base.json", sweep((8, 16, 32)))])


@pytest.fixture(scope="module")
def one_page(one):
    return render_page(one)


def archives(folder, *results, name="a"):
    return read_archives([write(folder / f"{name}.json", results)])


def single(**changes):
    """A case that draws as little as possible."""
    return streamed_case(2, num_runs=changes.pop("num_runs", 1), arms=("cached",), **changes)


def text_of(page):
    """What a reader sees, without markup and figures."""
    bare = re.sub(r"<(style|svg).*?</\1>|<[^>]*>", " ", page.replace("<wbr>", ""), flags=re.DOTALL)
    return " ".join(html.unescape(bare).split())


def names_in(page):
    """Every element and attribute of a page."""
    found = set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.update({tag, *(name for name, _ in attributes)})
    parser.feed(page)
    assert {"svg", "table", "aria-label"} < found
    return found


# The page.


def test_the_first_screen_says_what_was_measured(one_page):
    text = text_of(one_page)
    assert text.index("Benchmarks of tiny") < text.index("Quantities")
    for words in (
        "tiny (random, seed 0), float32, scaled_dot_product_attention", "cpu: A Processor, 2 threads", "c0ffee012345",
        "2026-11-29 17:33 UTC", f"{BENCHMARK}: 3 cases of cached, naive, 6 runs each",
        "Nothing in these results speaks against them",
    ):  # fmt: skip
        assert words in text[: text.index("Quantities")]


def test_what_was_paid_once_is_on_the_first_screen_where_anything_was(one_page, tmp_path):
    paid = {"num_compilations": 1, "compile_s": 2.5, "num_captures": 3, "capture_s": 0.5}
    page = render_page(archives(tmp_path, single(details={"warm_up": {"num_runs": 2, **paid}})))
    assert "paid once 1 compilation (2.5 s) and 3 CUDA graph captures (0.5 s) in warm-up" in text_of(page)
    assert "paid once" not in text_of(one_page)


def test_a_quantity_has_a_row_per_case_and_a_cell_per_arm(one, one_page):
    text = text_of(one_page)
    assert "TTFT ms, lower is better first token - arrival; median over runs case cached naive" in text
    measured = {m.arm: m for m in one[0].results[1].measurements if m.metric.name == "ttft_s"}
    cells = (f"{m.value * 1e3:#.3g} {m.low * 1e3:#.3g} .. {m.high * 1e3:#.3g} n 6" for m in measured.values())
    assert f"16 {' '.join(cells)}" in text
    assert "Decode rate tokens/s, higher is better" in text


def test_counts_are_exact_and_whole(one_page):
    text = text_of(one_page)
    assert "exact: the same on every run, so any change is a change; lower is better" in text
    assert "16 cached 16,000,000 592 1,048,576 0" in text
    assert "The same at every value of the axis: Graph breaks." in text


def test_operators_are_counted_by_name(one_page):
    assert "growth[16] operator cached naive aten.mm.default 480 480 aten.add.Tensor 7 7" in text_of(one_page)


def test_every_curve_and_every_distribution_is_drawn(one_page):
    drawn = re.findall(r'role="img" aria-label="([^"]*)"', one_page)
    for title in ("TTFT", "ITL p50", "E2E", "Speedup", "Decode rate", "FLOPs", "Peak bytes"):
        assert [alt for alt in drawn if alt.startswith(f"{title} in ")], title
    assert len([alt for alt in drawn if alt.startswith("distribution of ITL")]) == 3


def test_a_curve_comes_with_its_equation_and_intervals(one_page):
    text = text_of(one_page)
    assert re.search(r"naive [\d.]+ ms \+ [\d.]+ ms/token · new tokens.* 95 %: a [\d.-]+ \.\. [\d.]+; b", text)
    assert re.search(r"FLOPs lower is better .*1000000 FLOP/token · new tokens 95 %: a exact; b exact", text)


def test_all_of_the_provenance_is_there(one_page):
    text = text_of(one_page)
    for key, value in PROVENANCE.items():
        assert key in text
        for told in value.values() if isinstance(value, dict) else [value] if isinstance(value, str) else []:
            assert told in text
    for words in ("versions.torch 2.13.0", "device_name not known", "load_average 0.5 0.4 0.3", "machine.node laptop"):
        assert words in text


def test_the_page_needs_nothing_but_itself(one_page):
    assert not re.findall(r"https?:|//[a-z]|@import|<script|url\((?!#)", one_page)
    assert set(re.findall(r'(?:src|href)="([^"#]*)', one_page)) <= {"", "data:,"}


def test_every_id_is_there_once_and_every_link_leads_somewhere(one_page):
    ids = re.findall(r'\bid="([^"]*)"', one_page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', one_page)) | set(re.findall(r"url\(#([^)]*)\)", one_page)) <= set(ids)


def test_figures_have_the_pages_colours_and_no_size_of_their_own(one_page):
    figures = re.findall(r"<figure>.*?</figure>", one_page, flags=re.DOTALL)
    assert figures
    for figure in figures:
        assert re.findall(r"#[0-9a-fA-F]{6}\b", figure) == []
        assert re.search(r'<svg viewBox="0 0 [\d.]+ [\d.]+" role="img"', figure)


def test_the_same_file_gives_the_same_page(one, one_page):
    assert render_page(one) == one_page


def test_a_single_run_without_a_curve_is_a_page(tmp_path):
    text = text_of(render_page(archives(tmp_path, single())))
    assert "No times were measured at two or more values of a number" in text
    assert "n too small" in text
    assert "1 case of cached, 1 run each" in text


def test_undefined_values_and_missing_logs_are_said(tmp_path):
    result = streamed_case(1, arms=("cached",), details={}, runs={})
    text = text_of(render_page(archives(tmp_path, result)))
    assert "undefined" in text
    assert "No run tells the gaps between its tokens" in text


def test_nothing_measured_but_provenance_is_a_page(tmp_path):
    text = text_of(render_page(archives(tmp_path, single(measurements=(), details={}, runs={}))))
    assert "No times were measured" in text
    assert "No work was counted" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_text_and_nothing_else(tmp_path, name):
    flags = (Flag(kind=name or "kind", arm="cached", what=name),)
    told = PROVENANCE | {"model": name, name: name}
    names = {"case": name, "benchmark": f"b.py::test_{name}", "flags": flags, "provenance": told}
    kinds = [single(params={name: n, "s": name}, **(names | {"case": f"{name}{n}"})) for n in (1, 2)]
    read = archives(tmp_path, *kinds)
    page, labelled = render_page(read), label_results(read)
    assert not {"script", "onload"} & names_in(page)
    assert name.strip() in html.unescape(page)
    rows = list(csv.DictReader(io.StringIO(csv_text(read), newline="")))
    assert {row["case"] for row in rows} == {f"{name}1", f"{name}2"}
    blocks = markdown_text(read, labelled).split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("| benchmark")]
    assert tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, table


# Several files.


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    other = PROVENANCE | {"commit": "deadbeef" * 5 + "+dirty", "cpu": "Another Processor"}
    base = write(folder / "base.json", [streamed_case(8)])
    head = write(folder / "head.json", [streamed_case(8, seed=1, provenance=other)], machine_info={"node": "server"})
    return read_archives([base, head])


def test_one_case_in_two_files_is_two_labelled_rows(two):
    text = text_of(render_page(two))
    assert re.search(r"8 base [\d.]+ [\d.]+ \.\. [\d.]+ n 6 [\d.]+ .{0,30}n 6 8 head [\d.]+", text)
    assert "cached, base cached, head" not in text  # one case draws no curve
    assert "cached, base naive, base cached, head naive, head" in text


def test_files_stand_side_by_side(two):
    text = text_of(render_page(two))
    assert "key base head model tiny" in text
    assert "commit c0ffee012345 deadbeefdead, with uncommitted changes" in text


# What to doubt.


def kinds(found):
    return [doubt.kind for doubt in found]


def test_differences_between_files_are_doubts(two):
    found = {doubt.kind: doubt.places for doubt in doubts(two)}
    assert list(found) == ["different commits", "different machines", "uncommitted changes"]
    assert found["different commits"] == (("commit", "c0ffee012345 (base); deadbeefdead (head)"),)
    assert ("cpu", "A Processor (base); Another Processor (head)") in found["different machines"]
    assert ("host", "laptop (base); server (head)") in found["different machines"]


@pytest.mark.parametrize(
    ("changes", "kind", "place"),
    [
        ({"flags": (Flag(kind="contaminated", arm="", what="busy"),)}, "contaminated", ("growth[2]", "busy")),
        ({"flags": (Flag(kind="drift", arm="cached", what="up"),)}, "drift", ("growth[2]", "cached: up")),
        ({"flags": (Flag(kind="unheard of", arm="", what="x"),)}, "unheard of", ("growth[2]", "x")),
        ({"provenance": UNKNOWN}, "commit unknown", ("a", "git did not know the measured package")),
        ({"provenance": DIRTY}, "uncommitted changes", ("a", f"on top of {'c' * 12}")),
        ({"num_runs": 5}, "too few runs", ("growth[2]", "cached: TTFT, ITL p50, TPOT, E2E, Decode rate")),
        ({"num_runs": 4}, "n too small", ("growth[2]", "cached: TTFT, ITL p50, ITL p90, TPOT, E2E, Decode rate")),
    ],
)  # fmt: skip
def test_a_reason_to_look_twice_is_told_with_its_place(tmp_path, changes, kind, place):
    found = {doubt.kind: doubt.places for doubt in doubts(archives(tmp_path, single(**({"num_runs": 6} | changes))))}
    assert place in found[kind]


def test_undefined_values_are_doubted(tmp_path):
    found = {doubt.kind: doubt.places for doubt in doubts(archives(tmp_path, streamed_case(1, arms=("cached",))))}
    assert found["undefined"] == (("growth[1]", "cached: ITL p50, ITL p90, TPOT, Decode rate"),)


def test_the_gravest_doubt_comes_first_and_marks_its_numbers(tmp_path):
    flags = tuple(Flag(kind=kind, arm="", what="x") for kind in ("outlier", "new", "contaminated", "drift"))
    read = archives(tmp_path, single(flags=flags, num_runs=30))
    assert kinds(doubts(read)) == ["contaminated", "drift", "outlier", "new"]
    page = render_page(read)
    assert 'title="outlier, new, contaminated, drift"' in page
    assert text_of(page).index("contaminated") < text_of(page).index("Quantities")


def test_good_results_give_no_doubt(one):
    assert doubts(one) == []


# CSV and Markdown.


def test_csv_holds_every_sample_at_full_precision(one):
    rows = list(csv.DictReader(io.StringIO(csv_text(one))))
    wanted = [
        (result.case, m.metric.name, m.arm, str(index), repr(sample))
        for result in one[0].results for m in result.measurements for index, sample in enumerate(m.samples)
    ]  # fmt: skip
    assert [tuple(row[name] for name in ("case", "metric", "arm", "sample", "value")) for row in rows] == wanted
    assert {row["file"] for row in rows} == {"base"}
    assert json.loads(rows[0]["params"]) == {"new_tokens": 8}
    assert (rows[0]["unit"], rows[0]["better"], rows[0]["n"]) == ("s", "lower", "6")


def test_csv_keeps_a_measurement_without_samples(tmp_path):
    rows = list(csv.DictReader(io.StringIO(csv_text(archives(tmp_path, streamed_case(1))))))
    [row] = [row for row in rows if row["metric"] == "itl_p50_s" and row["arm"] == "naive"]
    assert (row["sample"], row["value"], row["summary"], row["n"]) == ("", "", "", "0")


def test_csv_labels_the_outlier_and_keeps_it(tmp_path):
    result = single(num_runs=8)
    stalled = result.measurements[0].__class__(
        **{name: getattr(result.measurements[0], name) for name in ("metric", "arm", "value", "low", "high")},
        samples=(0.005, 0.0051, 0.0049, 0.005, 0.0052, 0.0048, 0.0051, 3.0), num_observations=8,
    )  # fmt: skip
    read = archives(tmp_path, single(measurements=(stalled,)))
    rows = list(csv.DictReader(io.StringIO(csv_text(read))))
    assert [row["is_outlier"] for row in rows] == ["False"] * 7 + ["True"]


def test_markdown_is_tables_for_a_pull_request(two):
    text = markdown_text(two, label_results(two))
    assert "**TTFT** (ms, lower is better)" in text
    assert "| benchmark | file | `cached` | `naive` |\n| --- | --: | --: | --: |" in text
    assert re.search(rf"\| `{BENCHMARK}\[8\]` \| `head` \| [\d.]+ \[[\d.]+ \.\. [\d.]+\] n 6 \|", text)
    assert "- `different commits` (1): The files hold different code." in text
    assert "8] naive` | `head` | 8,000,000 |" in text


# The command.


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_three_files_and_says_where(tmp_path):
    file, output = write(tmp_path / "a.json", [single()]), tmp_path / "new" / "page.html"
    done = report(file, "--output", output)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(output.with_suffix(suffix)) for suffix in (".html", ".csv", ".md")]
    assert output.read_text("utf-8").startswith("<!doctype html>")
    assert sorted(path.suffix for path in output.parent.iterdir()) == [".csv", ".html", ".md"]


def test_without_a_file_the_newest_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path(".benchmarks/Linux/0001_x.json"), [single()])
    assert report().exit_code == 0
    assert Path(".benchmarks/report.html").exists()


def test_without_any_file_the_command_to_run_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = report()
    assert done.exit_code == 2
    assert done.stderr.startswith("error: no results file below .benchmarks")
    assert "pytest --benchmark-only --benchmark-autosave" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_bad_file_is_one_line_and_leaves_an_older_page_alone(tmp_path):
    good, bad, output = write(tmp_path / "a.json", [single()]), tmp_path / "bad.json", tmp_path / "page.html"
    bad.write_text('{"machine_info": ')
    report(good, "--output", output)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = report(good, bad, "--output", output)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {bad}: no complete JSON")
    assert done.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["page.csv", "page.md", "page"])
def test_an_output_that_is_no_page_is_refused(tmp_path, name):
    done = report(write(tmp_path / "a.json", [single()]), "--output", tmp_path / name)
    assert done.exit_code == 2
    assert "--output has to end in .html" in done.stderr


def test_an_output_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "page.html").mkdir()
    done = report(write(tmp_path / "a.json", [single()]), "--output", tmp_path / "page.html")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "page.html"]


def test_help_teaches():
    text = " ".join(report("--help").stdout.split())
    for words in ("--benchmark-autosave && python -m benchmarks report", "base.json head.json", "Exit status 2"):
        assert words in text


# Writing.


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "b"
    write_files({first: "old", second: "old"})

    def full(draft, path):
        raise OSError("no space left")

    monkeypatch.setattr(exports, "_publish", full)
    with pytest.raises(OSError, match="no space"):
        write_files({first: "new" * 9999, second: "new"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old", "b": "old"}


def test_a_written_file_is_readable_like_any_other(tmp_path):
    (tmp_path / "plain").touch()
    write_files({tmp_path / "a": "x"})
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_results_file_is_never_overwritten_by_its_own_report(tmp_path):
    results = write(tmp_path / "in.csv", sweep())
    before = results.read_bytes()
    with pytest.raises(ArchiveError, match="is read here"):
        write_report([results], tmp_path / "in.html")
    assert (results.read_bytes(), list(tmp_path.iterdir())) == (before, [results])


def test_where_one_file_can_not_be_put_none_is(tmp_path):
    results = write(tmp_path / "in.json", sweep())
    (tmp_path / "out.html").write_text("old")
    (tmp_path / "out.md").mkdir()
    with pytest.raises(IsADirectoryError, match=r"out\.md"):
        write_report([results], tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text() == "old"
    assert not (tmp_path / "out.csv").exists()
