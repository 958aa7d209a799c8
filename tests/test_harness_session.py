"""Whole sessions in processes of their own: what people type, and what they get.

The sessions run in a copy of the benchmarks, so that they leave no curves behind, together with a few planted ones.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from child_process import inherited

import nanoserve
from benchmarks.bench_kv_cache import LATENCIES, TOTALS
from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.archive import read_archives, read_results
from benchmarks.harness.loop import Plan
from benchmarks.harness.metrics import METRICS
from benchmarks.harness.opening import opened

ROOT = Path(__file__).parents[1]
USAGE_ERROR = pytest.ExitCode.USAGE_ERROR

MARKED = """
import pytest

@pytest.mark.gpu
def test_needs_a_gpu(): pass

@pytest.mark.slow
def test_takes_minutes(): pass

@pytest.mark.full
@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s")
@pytest.mark.parametrize("tokens", [4, 5])
def test_has_long_points_only(measure, tokens):
    measure.stream(prompt_tokens=tokens, new_tokens=2)
"""

PLANTED = """
import pytest

@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s", "speedup")
def test_measures_less(measure):
    measure.stream(prompt_tokens=4, new_tokens=2)

@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s", "goodput")
def test_unknown_quantity(measure):
    measure.stream(prompt_tokens=4, new_tokens=2)

@pytest.mark.arms(only={})
def test_declares_nothing(measure):
    measure.stream(prompt_tokens=4, new_tokens=2)

@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s")
def test_raises_itself(measure):
    measure.stream(prompt_tokens=4, new_tokens=2)
    raise RuntimeError("raised by the test")

@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s")
@pytest.mark.parametrize("tokens", [3, 4], ids=["a[b]-/,x y", "a[b]-/,x z"])
def test_odd_names(measure, tokens):
    measure.stream(prompt_tokens=tokens, new_tokens=2)

def test_is_no_benchmark(): pass
"""


LOW_CEILINGS = """
from benchmarks.harness import ceilings
ceilings._READ_BYTES, ceilings._SQUARE = {"cpu": 32 << 20}, {"cpu": 256}
"""
"""A plugin: what the machine can do at most is looked for beside every case, and is not what these tests are about."""


class Session:
    def __init__(self, folder, *arguments, **settings):
        environment = inherited()
        environment["OMP_NUM_THREADS"] = "1"  # a busy machine must not make tiny sessions slow
        environment["PYTHONPATH"] = str(Path(nanoserve.__file__).parents[1])  # the very engine that is tested here
        environment |= settings
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=short", *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        self.status, self.text = done.returncode, done.stdout + done.stderr

    def outcome(self, test):
        """PASSED, FAILED, ERROR or SKIPPED, from pytest's own summary; None for a test that did not run."""
        found = re.findall(rf"^(PASSED|FAILED|ERROR) \S*{re.escape(test)}", self.text, re.MULTILINE)
        return found[0] if found else None


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "benchmarks", root / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    (root / "low_ceilings.py").write_text(LOW_CEILINGS)
    for name, text in (("marked", MARKED), ("planted", PLANTED)):
        (root / name).mkdir()
        (root / name / f"bench_{name}.py").write_text(text)
    return root


@pytest.fixture(scope="module")
def bare(project):
    """A case of each curve of the real benchmarks, which run untimed beside these tests anyway, and the marked ones."""
    cases = ("test_generation_length[8]", "test_prompt_length[512]")
    nodes = [f"benchmarks/bench_kv_cache.py::{case}" for case in cases]
    return Session(project, *nodes, "marked", "--model", "tiny")


@pytest.fixture(scope="module")
def measured(project):
    """Two cases of the real benchmarks and all of the planted ones, and the JSON that pytest-benchmark writes."""
    chosen = "prompt_length and 16 or generation_length and 8 or planted"
    options = ["--benchmark-only", "--model", "tiny", "--samples", "2", "--benchmark-json=out.json", "-k", chosen]
    session = Session(project, "-p", "low_ceilings", "benchmarks", "planted", *options)
    written = json.loads((project / "out.json").read_text(), parse_constant=pytest.fail)
    return session, {each["name"]: each for each in written["benchmarks"]}


# Without a wish for timing.


def test_a_bare_session_passes_and_measures_nothing(bare):
    assert bare.status == 0, bare.text
    assert bare.outcome("test_generation_length[8]") == bare.outcome("test_prompt_length[512]") == "PASSED"
    for words in ("what was measured", "StdDev", "curve:"):
        assert words not in bare.text


def test_slow_tests_are_left_out(bare):
    assert bare.outcome("test_takes_minutes") is None
    assert "2 deselected" in bare.text


def test_no_benchmark_is_left_out_as_a_whole(bare):
    assert bare.outcome("test_has_long_points_only[4]") == "PASSED"
    assert bare.outcome("test_has_long_points_only[5]") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a CUDA device")
def test_gpu_tests_are_skipped_without_one(bare):
    assert "needs a CUDA device" in bare.text
    assert "1 skipped" in bare.text


@pytest.mark.slow
@pytest.mark.parametrize("wish", [["--slow"], ["-m", "slow"]])
def test_slow_tests_run_on_request(project, wish):
    session = Session(project, "marked", "--deselect", "marked/bench_marked.py::test_needs_a_gpu", *wish)
    assert (session.status, session.outcome("test_takes_minutes")) == (0, "PASSED"), session.text


# With one.


def test_only_the_chosen_benchmarks_are_measured(measured):
    session, written = measured
    real = {name for name in written if "length" in name}
    assert real == {"test_prompt_length[16]", "test_generation_length[8]"}
    assert session.outcome("test_is_no_benchmark") is None


def test_every_declared_number_is_written_with_its_meaning(measured):
    _, written = measured
    told = written["test_generation_length[8]"]["extra_info"]
    expected = {(name, arm) for name in LATENCIES for arm in ("cached", "naive")}
    found = {(each["metric"], each["arm"]): each for each in told["measurements"]}
    shares = {key for key in found if key[0] in ("mbu", "mfu")}  # of a ceiling, where that is one for so small a shape
    assert set(found) - shares == expected | {(name, "cached over naive") for name in TOTALS}
    for (name, _), each in found.items():
        assert (each["unit"], each["better"], each["gate"], each["exact"]) == (
            METRICS[name].unit, METRICS[name].better, METRICS[name].gate, False,
        )  # fmt: skip
        assert each["value"] > 0
        assert len(each["samples"]) == 2
        assert each["n"] == (2 * 7 if "itl" in name else 2)
        assert each["n_too_small"] == (each["n"] < 5 or name == "itl_p90_s")


def test_the_result_says_what_was_measured(measured):
    _, written = measured
    told = written["test_prompt_length[16]"]["extra_info"]["provenance"]
    assert (told["model"], told["instrument_version"]) == ("tiny", INSTRUMENT_VERSION)
    assert re.fullmatch("[0-9a-f]{64}", told["source_sha256"])
    assert Path(told["package"]) == Path(nanoserve.__file__).parent
    assert {"commit", "device", "dtype", "attention", "num_threads", "cpu", "load_average", "versions"} <= set(told)
    assert {"steal_share", "others_share", "control_s", "gpu", "stopwatch", "control"} <= set(told)


def test_the_whole_event_log_is_kept(measured):
    _, written = measured
    told = written["test_generation_length[8]"]["extra_info"]
    assert set(told["runs"]) == {"cached", "naive"}
    for run in told["runs"]["naive"]:
        assert [num_tokens for _, num_tokens in run["stamps"]] == [1] * 8
        assert (run["num_prompt_tokens"], run["num_cached"], run["num_prefilled"]) == (16, 0, 16)
        assert run["finish_reason"] == "length"


def test_a_whole_session_can_be_read_back(measured, project):
    _, written = measured
    results = {result.case: result for result in read_results([project / "out.json"])}
    for each in written.values():
        assert results[each["extra_info"]["case"]].as_dict() == each["extra_info"]


def test_the_control_ran_before_every_run_and_warm_up_was_kept_track_of(measured):
    _, written = measured
    for name in ("test_generation_length[8]", "test_prompt_length[16]"):
        told = written[name]["extra_info"]
        num_warmups = told["details"]["warm_up"]["num_runs"]
        assert 2 <= num_warmups <= 5
        num_arms = len(told["runs"])
        assert len(told["provenance"]["control_s"]) == num_arms * (num_warmups + 2)


def test_pytest_benchmark_records_the_very_same_times(measured):
    _, written = measured
    for name, each in written.items():
        e2e = [m for m in each["extra_info"]["measurements"] if m["metric"] == "e2e_s"]
        if e2e:
            assert each["stats"]["data"] == e2e[0]["samples"], name


def test_tables_and_curves_follow_the_session(measured, project):
    session, _ = measured
    assert "TTFT (" in session.text
    assert "nanoserve: what was measured" in session.text
    for line in re.findall(r"^curve: (.*)$", session.text, re.MULTILINE):
        assert Path(line).is_relative_to(project)
        assert Path(line).stat().st_size > 0


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("test_measures_less", "declared but not measured: speedup"),
        ("test_unknown_quantity", "metric 'goodput' is not declared; declared are: ttft_s, queue_wait_s"),
        ("test_declares_nothing", "carries the markers arms"),
        ("test_raises_itself", "raised by the test"),
    ],
)
def test_a_benchmark_that_breaks_its_word_is_red_and_leaves_no_number(measured, test, message):
    session, written = measured
    assert session.status == pytest.ExitCode.TESTS_FAILED
    assert session.outcome(test) in ("FAILED", "ERROR")
    assert message in session.text
    assert test not in written


def test_odd_parameter_ids_survive(measured):
    session, written = measured
    names = {"test_odd_names[a[b]-/,x y]", "test_odd_names[a[b]-/,x z]"}
    assert names <= set(written)
    assert "odd_names[a[b]-/,x y]" in session.text.partition("what was measured")[2].partition("curve:")[0]


# What cannot be done is one line.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nonsense"], "unknown model 'nonsense'; choose one of: smollm2-135m"),
        pytest.param(
            ["--model", "tiny", "--device", "cuda"],
            "this machine has no CUDA device",
            marks=[pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")],
        ),
        (["--model", "tiny", "--samples", "0"], "--samples must be a whole number of at least 1, not '0'"),
    ],
    ids=["model", "device", "samples"],
)
def test_an_impossible_session_ends_with_one_line(project, arguments, message):
    session = Session(project, "benchmarks", *arguments)
    assert session.status == USAGE_ERROR, session.text
    assert sum(message in line for line in session.text.splitlines()) == 1, session.text
    assert "Traceback" not in session.text
    assert "fixtures.py" not in session.text
    assert session.outcome("test_prompt_length[16]") is None


@pytest.mark.parametrize("wish", ["--benchmark-only", "--benchmark-json=never.json"])
def test_timing_beside_other_workers_is_refused(project, wish):
    """Workers switch timing off, and a measurement that was asked for and did not happen must not be green."""
    session = Session(project, "benchmarks", "--model", "tiny", "-n", "2", "-k", "prompt_length and 16", wish)
    assert session.status == USAGE_ERROR, session.text
    assert "xdist" in session.text
    assert "Traceback" not in session.text
    assert not (project / "never.json").exists()


@pytest.mark.slow
def test_without_the_index_random_weights_stand_in_and_every_result_says_so(project, tmp_path):
    written = tmp_path / "results.json"
    chosen = ("benchmarks", "-k", "prompt_length and 16", "--device", "cpu", "--samples", "1", "--max-warmups", "0")
    session = Session(
        project,
        *chosen,
        f"--benchmark-json={written}",
        HF_HOME=str(tmp_path / "empty"),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="",
    )
    assert session.status == 0
    assert "measuring random weights of the same shape, because: " in session.text
    (result,) = json.loads(written.read_text())["benchmarks"]
    told = result["extra_info"]["provenance"]
    assert (told["model"], told["weights"]) == ("smollm2-135m-random", "random, seed 0")


DISTURBED = """
from benchmarks.harness import band, watch
watch.what_happened = lambda *_: ["planted: somebody else computed"]
band.judge = lambda *_: band.Verdict(state="contaminated", reasons=("planted: slow",))
"""


@pytest.mark.slow
def test_what_disturbed_a_case_and_what_disturbed_its_pass_reach_the_file_and_the_terminal(project):
    (project / "disturbed.py").write_text(DISTURBED)
    chosen = ("benchmarks", "-k", "prompt_length and 16", "--model=tiny", "--samples=4", "--max-warmups=0")
    path = f"{Path(nanoserve.__file__).parents[1]}{os.pathsep}{project}"
    session = Session(project, *chosen, "-p", "disturbed", "--benchmark-json=disturbed.json", PYTHONPATH=path)
    assert session.status == 0, session.text
    (result,) = read_archives([project / "disturbed.json"])[0].results
    assert [flag.what for flag in result.flags if flag.kind == "contaminated"] == [
        "planted: somebody else computed", "planted: slow",
    ]  # fmt: skip
    assert result.is_contaminated
    assert "! contaminated: prompt_length[16]: planted: slow" in session.text


def test_before_each_run_the_control_runs_and_a_short_request_wakes_what_it_left_cold():
    log = []
    watch = SimpleNamespace(turn=lambda is_sample: log.append(("control", is_sample)))

    def stream(prompt, num_new_tokens, **arm):
        log.append((len(prompt), num_new_tokens, arm))
        return iter(())

    plan = Plan(name="growth", quantities=("ttft_s",), arms={"a": {"cache": "none"}, "b": {}})
    turns = opened(watch, plan, SimpleNamespace(stream=stream, vocab_size=100), take=None, over=None)
    with turns("a", 0):
        log.append("run")
    with turns("b", None):
        log.append("warm-up")
    assert log == [("control", True), (8, 2, {"cache": "none"}), "run", ("control", False), (8, 2, {}), "warm-up"]
