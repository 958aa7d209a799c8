"""Discovery and one pass of the bridge to asv, in a process that believes to be asv's, on a suite written here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
'''

PROBE = """
import json, os, sys
from pathlib import Path
os.environ["ASV"] = "true"
sys.path.insert(0, os.getcwd())
from benchmarks.harness import bridge
bridge.prove_installed = lambda *_: None
from benchmarks import asv_suite
from asv_runner.discovery import disc_benchmarks
found = {b.name: b for b in disc_benchmarks(str(Path("benchmarks").resolve()))}
told = {name: [b.params, b.param_names, b.unit, b.version, b.setup_cache_key] for name, b in found.items()}
passes = {}
for name, b in found.items():
    if b.setup_cache_key not in passes:
        passes[b.setup_cache_key] = b._setup_cache()
kept = {key: [[list(k) for k in p["values"]], p["failed"], p["skipped"]] for key, p in passes.items()}
print("TOLD" + json.dumps([told, kept]))
"""


def probe(folder):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "ASV"))}
    environment = inherited | {"NANOSERVE_BENCH_ARGS": "--model tiny --device cpu --samples 1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROBE]
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
        "bench_scratch.test_ids.track_fast_per_slow_time",
        "bench_scratch.test_fates.track_ttft_s",
    }
    assert {unit for _, _, unit, _, _ in told.values()} == {"seconds", "ratio"}


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


def test_versions_follow_what_can_move_a_number(folder, probed):
    """A constant that a test reads changes its version; another test's body does not."""
    before = {name: version for name, (_, _, _, version, _) in probed[0].items()}
    path = folder / "benchmarks" / "bench_scratch.py"
    try:
        path.write_text(SUITE.replace("COUNT = 2", "COUNT = 4"), "utf-8")
        constant = {name: version for name, (_, _, _, version, _) in probe(folder)[0].items()}
        path.write_text(SUITE.replace("prompt_tokens=2, new_tokens=2", "prompt_tokens=2, new_tokens=3"), "utf-8")
        body = {name: version for name, (_, _, _, version, _) in probe(folder)[0].items()}
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
