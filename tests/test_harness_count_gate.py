"""The gate for counts on whole results files, as somebody types it: same, worse, and not comparable."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import sample_results

from benchmarks.harness.count_gate import NO_DATA, SAME, WORSE, compare_counts
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import exact_count, summarise_values

ROOT = Path(__file__).parents[1]
COUNTS = {"num_operators": 146, "peak_bytes": 2448, "num_tokens_recomputed": 0}


def file_of(path, counts=COUNTS, operators=(("aten.mm.default", 28),), ttft_s=0.5, case="16", **setup):
    measured = [exact_count(metric(name), "cached", value) for name, value in counts.items()]
    measured.append(summarise_values(metric("ttft_s"), "cached", [ttft_s] * 6))
    whole = sample_results.streamed_case()
    details = {"operators": {"cached": dict(operators)}}
    told = sample_results.PROVENANCE | setup
    changed = {"case": case, "measurements": tuple(measured), "runs": {}, "details": details, "provenance": told}
    result = dataclasses.replace(whole, **changed)
    return sample_results.write(path, [result])


def compared(tmp_path, **head):
    return compare_counts(file_of(tmp_path / "base.json"), file_of(tmp_path / "head.json", **head))


def test_equal_counts_are_green_whatever_the_times_do(tmp_path):
    code, told = compared(tmp_path, ttft_s=5.0)
    assert code == SAME
    assert told == "0 counts worse, 0 better, 0 without data, 3 the same\nevery count is the same"


def test_one_more_operator_is_red_and_told_by_its_name(tmp_path):
    operators = (("aten.mm.default", 28), ("aten.add.Tensor", 1))
    code, told = compared(tmp_path, counts=COUNTS | {"num_operators": 147}, operators=operators)
    assert code == WORSE
    assert "worse: benchmarks/bench_x.py::test_growth[16] cached num_operators 146 -> 147 (+1" in told
    assert "operators of benchmarks/bench_x.py::test_growth[16] cached: aten.add.Tensor +1" in told


def test_less_work_is_green_and_told(tmp_path):
    code, told = compared(tmp_path, counts=COUNTS | {"peak_bytes": 2000})
    assert code == SAME
    assert "\nbetter:" in told


@pytest.mark.parametrize(
    "head",
    [
        {"case": "32"},  # renamed
        {"counts": {"num_operators": 146}},  # one count less
        {"counts": COUNTS | {"peak_bytes": None}},
        {"counts": {}},
    ],
)
def test_what_can_not_be_compared_is_not_good(tmp_path, head):
    code, told = compared(tmp_path, **head)
    assert code == NO_DATA
    assert "no data" in told


@pytest.mark.parametrize(
    "setup", [{"model": "small"}, {"dtype": "bfloat16"}, {"device": "cuda"}, {"versions": {"torch": "2.14.0"}}]
)
def test_counts_of_another_setup_do_not_compare(tmp_path, setup):
    code, told = compared(tmp_path, **setup)
    assert code == NO_DATA
    assert str(next(iter(setup.values()))).strip("{}'").split("'")[-1] in told


def test_two_files_without_counts_are_no_comparison(tmp_path):
    files = [file_of(tmp_path / f"{name}.json", counts={}) for name in ("base", "head")]
    code, told = compare_counts(*files)
    assert code == NO_DATA
    assert told.endswith("no data: nothing was compared")


@pytest.mark.parametrize(
    ("head", "code", "said"),
    [(COUNTS, SAME, "same"), (COUNTS | {"num_operators": 147}, WORSE, "worse"), (None, 2, "head.json")],
)
def test_the_command_ends_with_the_verdict(tmp_path, head, code, said):
    base, other = file_of(tmp_path / "base.json"), tmp_path / "head.json"
    if head:
        file_of(other, counts=head)
    command = [sys.executable, "-m", "benchmarks", "counts", str(base), str(other)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr
