"""Discovery and one pass of the bridge to asv, in a process that believes to be asv's, on a suite written here."""

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sample_results
from asv.results import Results
from asv.runner import BenchmarkResult

from benchmarks.harness import bridge, passes
from benchmarks.harness.errors import ForeignPackageError, InstrumentError
from benchmarks.harness.metrics import metric
from benchmarks.harness.passes import Taken
from benchmarks.harness.results import Flag
from benchmarks.harness.sidecar import keep_beside

ROOT = Path(__file__).parents[1]

SUITE = '''
"""A suite for the bridge."""
import pytest

COUNT = 2
IDS = ["plain", "a/b", "é,-x", "with space", "a[b]"]


class Thing:
    pass


@pytest.mark.arms(cached={"cache": "contiguous"}, naive={"cache": "none"})
@pytest.mark.quantities("ttft_s", "speedup")
@pytest.mark.parametrize("size", [2, 3, 2, 3, 2], ids=IDS)
def test_ids(measure, size):
    measure.stream(prompt_tokens=size, new_tokens=COUNT)
    measure.speedup(slow="naive", fast="cached")


@pytest.mark.arms(only={})
@pytest.mark.quantities("ttft_s", "itl_p90_s")
@pytest.mark.parametrize(
    "what",
    [
        "good",
        "raises",
        "skips",
        pytest.param("expected", marks=pytest.mark.xfail),
        pytest.param("slow", marks=pytest.mark.desk),
        Thing(),
    ],
)
def test_fates(measure, what):
    if what == "skips":
        pytest.skip("not here")
    if what in ("raises", "expected"):
        raise RuntimeError("broken on purpose")
    measure.stream(prompt_tokens=2, new_tokens=2)


@pytest.mark.arms(only={})
@pytest.mark.quantities("num_operators")
def test_counts(count_work):
    count_work.decode_step(context_tokens=4)
'''

PROBE = """
import json, os, sys
from pathlib import Path
os.environ["ASV"] = "true"
sys.path.insert(0, os.getcwd())
from benchmarks.harness import passes
passes.prove_installed = lambda *_: None
from benchmarks import asv_suite
from asv_runner.discovery import disc_benchmarks
found = {b.name: b for b in disc_benchmarks(str(Path("benchmarks").resolve()))}
told = {name: [b.params, b.param_names, b.unit, b.version, b.setup_cache_key] for name, b in found.items()}
passes = {}
for name, b in found.items():
    if b.setup_cache_key not in passes and "collect only" not in sys.argv:
        passes[b.setup_cache_key] = b._setup_cache()
kept = {key: [[list(k) for k in p["values"]], p["failed"], p["skipped"]] for key, p in passes.items()}
print("TOLD" + json.dumps([told, kept]))
"""


def probe(folder, *arguments):
    """What asv would discover, and what each pass leaves; with "collect only" nothing is measured."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "ASV"))}
    environment = inherited | {"NANOSERVE_BENCH_ARGS": "--model tiny --device cpu --samples 1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROBE, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)
    assert "TOLD" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.partition("TOLD")[2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A project with the real instrument and the suite above."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks", ignore=shutil.ignore_patterns("bench_*", "__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "benchmarks" / "bench_scratch.py").write_text(SUITE, "utf-8")
    return folder


@pytest.fixture(scope="module")
def probed(folder):
    return probe(folder)


def test_gated_metrics_become_series_and_nothing_else(probed):
    told, _ = probed
    assert set(told) == {
        "bench_scratch.test_ids.track_ttft_s",
        "bench_scratch.test_ids.track_inverse_speedup",
        "bench_scratch.test_fates.track_ttft_s",
        "bench_scratch.test_counts.track_num_operators",
    }
    assert {unit for _, _, unit, _, _ in told.values()} == {"seconds", "ratio", "operators"}


def test_counts_are_taken_once_and_need_no_statistics(probed):
    told, kept = probed
    *_, key = told["bench_scratch.test_counts.track_num_operators"]
    values, failed, skipped = kept[key]
    assert (values, failed, skipped) == ([["num_operators", "only", ""]], {}, {})


def test_ids_of_every_kind_survive_the_trip(probed):
    told, kept = probed
    params, names, *_ = told["bench_scratch.test_ids.track_ttft_s"]
    assert names == ["arm", "case"]
    assert params[0] == ["'cached'", "'naive'"]
    assert len(set(params[1])) == 5
    values, failed, skipped = kept[told["bench_scratch.test_ids.track_ttft_s"][4]]
    cases = {case for metric, arm, case in values}
    assert [repr(case) for metric, arm, case in values if (metric, arm) == ("ttft_s", "naive")] == params[1]
    assert sum(metric == "speedup" for metric, _, _ in values) == len(cases) == 5
    assert (failed, skipped) == ({}, {})


def test_one_bad_case_is_named_and_the_others_keep_their_numbers(probed):
    told, kept = probed
    values, failed, skipped = kept[told["bench_scratch.test_fates.track_ttft_s"][4]]
    assert {case for _, _, case in values} == {"good", "what5"}
    assert list(failed) == ["raises"]
    assert "broken on purpose" in failed["raises"]
    assert set(skipped) == {"skips", "expected"}
    assert "not here" in skipped["skips"]


def test_a_case_for_the_desk_is_left_out(probed):
    told, _ = probed
    assert "'slow'" not in told["bench_scratch.test_fates.track_ttft_s"][0][1]


@pytest.mark.slow
def test_versions_follow_what_can_move_a_number(folder, probed):
    """A constant that a test reads changes its version; another test's body does not."""
    before = {name: version for name, (_, _, _, version, _) in probed[0].items()}
    path = folder / "benchmarks" / "bench_scratch.py"
    try:
        path.write_text(SUITE.replace("COUNT = 2", "COUNT = 4"), "utf-8")
        constant = {name: version for name, (_, _, _, version, _) in probe(folder, "collect only")[0].items()}
        path.write_text(SUITE.replace("prompt_tokens=2, new_tokens=2", "prompt_tokens=2, new_tokens=3"), "utf-8")
        body = {name: version for name, (_, _, _, version, _) in probe(folder, "collect only")[0].items()}
    finally:
        path.write_text(SUITE, "utf-8")
    assert all(constant[name] != before[name] for name in before)
    assert {name for name in before if body[name] != before[name]} == {"bench_scratch.test_fates.track_ttft_s"}


def test_a_file_that_cannot_be_collected_is_no_small_suite(folder):
    broken = folder / "benchmarks" / "bench_broken.py"
    broken.write_text('"""Broken."""\nimport a_module_that_is_not_there\n')
    try:
        with pytest.raises(AssertionError, match="could not all be collected"):
            probe(folder)
    finally:
        broken.unlink()


# What asv is handed.


READ = {
    "id": "a pass",
    "values": {
        ("ttft_s", "cached", "16"): 0.5,
        ("num_operators", "cached", "16"): 146.0,
        ("ttft_s", "cached", "32"): 0.7,
    },
    "failed": {"64": "broken on purpose"},
    "skipped": {"128": "not here"},
    "contaminated": {"32"},
}


def read(name, case):
    return bridge._read(dict(READ), lambda: pytest.fail("measured again"), metric(name), "cached", case)


@pytest.fixture
def in_a_folder_of_asvs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_a_folder_of_asvs")
def test_a_time_is_one_sample_a_count_a_number_and_a_contaminated_case_no_sample():
    assert read("ttft_s", "16") == {"samples": [0.5], "number": 1}
    assert read("num_operators", "16") == 146.0
    assert read("ttft_s", "32") == {"samples": [], "number": 1}


@pytest.mark.usefixtures("in_a_folder_of_asvs")
@pytest.mark.parametrize(("case", "said"), [("64", "broken on purpose"), ("256", "'256' was not measured")])
def test_a_case_without_a_number_is_an_error(case, said):
    with pytest.raises(InstrumentError, match=said):
        read("ttft_s", case)


@pytest.mark.usefixtures("in_a_folder_of_asvs")
def test_a_number_is_never_handed_out_twice():
    fresh = READ | {"id": "another pass", "values": {("ttft_s", "cached", "16"): 0.9}}
    assert read("ttft_s", "16") == {"samples": [0.5], "number": 1}
    again = bridge._read(dict(READ), lambda: fresh, metric("ttft_s"), "cached", "16")
    assert again == {"samples": [0.9], "number": 1}


@pytest.mark.parametrize(("rounds", "value"), [([[1.0], [], [1.2]], 1.1), ([[], [1.0], [1.1]], 1.05), ([[], []], None)])
def test_asv_leaves_a_contaminated_round_out_and_has_no_data_without_any_other(rounds, value):
    """What asv itself makes of rounds that hand it no sample."""
    results = Results({"machine": "m"}, {}, "c" * 40, 0, "3.11", "environment", {})
    series = {"name": "b", "version": "1", "params": [], "param_names": [], "type": "track", "unit": "seconds"}
    for number, samples in enumerate(rounds):
        taken = BenchmarkResult(result=[True], samples=[samples], number=[1], errcode=0, stderr="", profile=None)
        results.add_result(series, taken, record_samples=True, append_samples=number > 0)
    assert results.get_result_value("b", []) == [value if value is None else pytest.approx(value)]


def contaminated(case):
    flags = (Flag(kind="contaminated", arm="", what="busy"),)
    return dataclasses.replace(sample_results.streamed_case(), case=case, flags=flags)


def test_a_pass_names_its_contaminated_cases():
    taken = Taken()
    taken.items = [SimpleNamespace(callspec=SimpleNamespace(id=case)) for case in ("8", "16")]
    taken.results = [sample_results.streamed_case(8), contaminated("16")]
    told = taken.under_names(["8", "16"])
    assert told["contaminated"] == {"16"}


# Provenance beside asv's results.


@pytest.fixture
def asv(tmp_path, monkeypatch):
    """A process of asv's, whose configuration has a comment and a results folder of its own."""
    (tmp_path / "asv.conf.json").write_text('{\n  // where\n  "results_dir": "kept/results",\n}\n')
    for name, value in {"CONF_DIR": str(tmp_path), "COMMIT": "c0ffee" * 6, "ENV_NAME": "py3.11"}.items():
        monkeypatch.setenv(f"ASV_{name}", value)
    return tmp_path / "kept" / "results" / "provenance" / platform.node() / "c0ffeec0ffee-py3.11.jsonl"


def test_each_pass_leaves_its_provenance_beside_the_result(asv):
    results = [sample_results.streamed_case(8), contaminated("16")]
    assert keep_beside("one", "bench_x.test_growth", results) == asv
    keep_beside("two", "bench_x.test_growth", results[:1])
    lines = [json.loads(line) for line in asv.read_text().splitlines()]
    assert [(line["pass"], line["case"], bool(line["flags"])) for line in lines] == [
        ("one", "8", False), ("one", "16", True), ("two", "8", False),
    ]  # fmt: skip
    assert lines[0]["provenance"] == sample_results.PROVENANCE
    assert lines[0]["measurements"][0]["samples"]
    assert list(asv.parent.iterdir()) == [asv]


def test_a_kill_in_the_middle_leaves_the_earlier_passes(asv, monkeypatch):
    keep_beside("one", "bench_x.test_growth", [sample_results.streamed_case(8)])
    before = asv.read_text()

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        keep_beside("two", "bench_x.test_growth", [sample_results.streamed_case(8)])
    assert asv.read_text() == before


def test_outside_of_asv_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("ASV_CONF_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    assert keep_beside("one", "name", [sample_results.streamed_case(8)]) is None
    assert list(tmp_path.iterdir()) == []


# One pass, without asv.


def passing(monkeypatch, results):
    """Run a pass whose session leaves these results; return what it leaves, and what is kept beside."""
    kept = []

    def session(folder, arguments, taken):
        taken.items = [SimpleNamespace(callspec=SimpleNamespace(id=each.case)) for each in results]
        taken.results = results
        return 0, ""

    monkeypatch.setattr(passes, "run_pytest", session)
    monkeypatch.setattr(passes, "keep_beside", lambda *told: kept.append(told))
    measured = passes.run_pass("bench_x.test_growth", "bench_x.py::test_growth", [each.case for each in results], ROOT)
    return measured, kept


def test_a_pass_measures_nothing_but_the_installed_package(monkeypatch):
    monkeypatch.setenv("ASV_ENV_DIR", "/somewhere/else")
    with pytest.raises(ForeignPackageError, match="which is not the package installed in /somewhere/else"):
        passing(monkeypatch, [sample_results.streamed_case(8)])


def test_asv_gets_the_best_run_and_the_sidecar_everything(monkeypatch):
    monkeypatch.setattr(passes, "prove_installed", lambda *_: None)
    results = [sample_results.streamed_case(8), contaminated("16")]
    measured, kept = passing(monkeypatch, results)
    ttft = next(m for m in results[0].measurements if (m.metric.name, m.arm) == ("ttft_s", "cached"))
    assert measured["values"]["ttft_s", "cached", "8"] == min(ttft.samples) < ttft.value
    assert measured["contaminated"] == {"16"}
    assert kept == [(measured["id"], "bench_x.test_growth", results)]


@pytest.mark.usefixtures("in_a_folder_of_asvs")
def test_a_count_of_a_contaminated_case_is_as_good_as_any():
    measured = READ | {"contaminated": {"16"}}
    assert bridge._read(measured, lambda: pytest.fail("again"), metric("num_operators"), "cached", "16") == 146.0
