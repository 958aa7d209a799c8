"""The asv that runs a pass, what it calls the machine, and what keeps two machines out of one series."""

import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sample_results
from asv.benchmarks import Benchmarks
from asv.commands import make_argparser
from asv.config import Config
from asv.machine import Machine
from scripted_gpus import ScriptedDriver

from benchmarks.harness import asv_process, identity, sidecar
from benchmarks.harness.asv_process import AsvCommand, machine_name, parse_command, results_folder
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gpu.driver import use_driver
from benchmarks.harness.gpu.readings import GpuState
from benchmarks.harness.identity import differences, refuse_another_machine
from benchmarks.harness.metrics import METRICS
from benchmarks.harness.sidecar import keep_beside
from benchmarks.harness.unreadable import unreadable_results

ROOT = Path(__file__).parents[1]

# asv's command line.


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "HEAD^!", "--bench", "prompt.*ttft", "-b", "decode"],
        ["run", "-e", "-b=ttft", "HEAD^!", "-a", "rounds=3", "--quick"],
        ["run", "-s", "5", "--bench=x", "NEW", "-j", "2", "--durations", "3", "--date-period", "1w"],
        ["run", "-eqb", "ttft", "main..HEAD", "--machine", "lab-2", "--launch-method", "spawn"],
        ["run", "--ben", "abbreviated", "-k"],
        ["--config", "other.json", "run", "--bench", "run"],
        ["-v", "continuous", "main", "HEAD", "-s", "--bench", "x", "-f", "1.05", "--append-samples", "-m", "lab"],
        ["continuous", "HEAD", "-b", "continuous", "-E", "virtualenv:3.11", "--no-stats", "--sort", "name"],
        ["find", "v1..main", "bench_x.track_y", "-i", "--skip-save"],
        ["find", "-m", "lab", "v1..main", "--parallel", "2", "bench_x.track_y"],
    ],
    ids=" ".join,
)
def test_a_command_line_is_read_as_asv_itself_reads_it(words):
    theirs = make_argparser()[0].parse_args(words)
    patterns = theirs.bench if isinstance(theirs.bench, list) else [theirs.bench] if theirs.bench else []
    assert parse_command(words) == AsvCommand(
        tuple(patterns), theirs.machine, theirs.config or "asv.conf.json", measures=True
    )


@pytest.mark.parametrize("words", [["profile", "x"], [], ["check"], ["run", "--new-option", "1", "--bench", "x"]])
def test_what_is_not_understood_asks_for_everything(words):
    assert parse_command(words) == AsvCommand(measures="run" in words)


@pytest.mark.parametrize(
    ("command_line", "words"),
    [
        (["/venv/bin/python", "/venv/bin/asv", "run", "-b", "x"], ["run", "-b", "x"]),
        (["python", "-P", "-m", "asv", "run"], ["run"]),
        (["asv.exe", "find"], ["find"]),
        (["python", "-m", "pytest", "asv"], None),
        (["python", "/env/lib/asv/benchmark.py", "setup_cache", "/benchmarks", "name", "{}"], None),
        (["bash", "-c", "asv run"], None),
        ([], None),
    ],
)
def test_asv_is_told_from_other_processes(command_line, words):
    assert asv_process._words_of_asv(command_line) == words


SERIES = {"name": "b.track_x", "params": [["'cached'", "'naive'"], ["'16'", "'é,-x'"]]}
PLAIN = {"name": "b.track_plain", "params": []}


@pytest.mark.parametrize(
    "patterns", [(), ("track_x",), ("cached", "plain"), (r"'cached', 'é,-x'\)",), ("^x",), ("16",)]
)
def test_series_are_selected_as_asv_selects_them(patterns):
    class Configuration:
        benchmark_dir = "benchmarks"

    theirs = Benchmarks(Configuration, [SERIES, PLAIN], regex=list(patterns))
    ours = AsvCommand(patterns)
    every = [(arm, case) for arm in SERIES["params"][0] for case in SERIES["params"][1]]
    assert [ours.selects(SERIES["name"], each) for each in every] == [
        i in theirs.benchmark_selection[SERIES["name"]] for i in range(4)
    ]
    assert ours.selects(PLAIN["name"], []) == (PLAIN["name"] in theirs)


def test_the_nearest_asv_above_this_process_is_found(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.harness.asv_process import *; "
    tail = "print(asv_command().patterns)"
    (tmp_path / "asv").write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code + tail!r}])\n")
    command = [sys.executable, tmp_path / "asv", "run", "--bench", "é a", "-b", "c"]
    assert subprocess.run(command, text=True, capture_output=True, check=True).stdout.strip() == "('é a', 'c')"


# asv's folder and its name of this machine.


@pytest.fixture
def asv(tmp_path, monkeypatch):
    """A process of asv's, at home nowhere, whose configuration has a comment and a results folder of its own."""
    (tmp_path / "asv.conf.json").write_text('{\n  // "results_dir": "old"\n  "results_dir": "kept/results",\n}\n')
    for name, value in {"CONF_DIR": str(tmp_path), "COMMIT": "c0ffee" * 6, "ENV_NAME": "py3.11"}.items():
        monkeypatch.setenv(f"ASV_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(asv_process, "_command_lines", list)
    return tmp_path / "kept" / "results"


def ran_by(monkeypatch, *words):
    monkeypatch.setattr(asv_process, "_command_lines", lambda: [["python", "-m", "asv", *words]])


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ('{"version": 1, "results_dir": "a/b", "html_dir": "c"}', "a/b"),
        ('{\n    "repo": ".",\n    // "results_dir": "old",\n    "results_dir" : "new"\n}', "new"),
        ('{"repo": "."}', "results"),
    ],
)
def test_the_results_folder_is_that_of_the_configuration(asv, text, folder):
    path = Path(os.environ["ASV_CONF_DIR"])
    (path / "asv.conf.json").write_text(text)
    assert results_folder() == path / folder


def test_another_configuration_is_read_where_asv_was_given_one(asv, monkeypatch):
    (asv.parents[1] / "other.json").write_text('{"results_dir": "elsewhere"}')
    ran_by(monkeypatch, "--config", "somewhere/other.json", "run")
    assert results_folder() == asv.parents[1] / "elsewhere"


HOST = platform.node()


@pytest.mark.parametrize(
    ("machines", "asked", "name"),
    [
        ({}, None, HOST),
        ({HOST: HOST, "lab": "lab"}, None, HOST),
        ({"lab": "lab"}, None, "lab"),
        ({HOST: HOST, "lab": "lab"}, "lab", "lab"),
        ({"lab": "renamed", "x": "x"}, "lab", "renamed"),
    ],
)
def test_the_machine_has_the_name_that_asv_gives_it(asv, monkeypatch, machines, asked, name):
    path = asv.parents[1] / ".asv-machine.json"
    if machines:
        path.write_text(json.dumps({"version": 1, **{key: {"machine": value} for key, value in machines.items()}}))
        theirs = Machine.load(machine_name=asked, _path=str(path)).machine
        assert name == theirs
    ran_by(monkeypatch, "run", *(["-m", asked] if asked else []))
    assert machine_name() == name


# Provenance beside asv's results.


def keep(pass_id, *results):
    return keep_beside(pass_id, {each.benchmark: "bench_x.test_growth" for each in results}, results)


def test_each_pass_leaves_its_provenance_beside_the_result(asv):
    one, other = sample_results.streamed_case(8), sample_results.streamed_case(16)
    path = asv / "provenance" / HOST / "c0ffeec0ffee-py3.11.jsonl"
    assert keep("one", one, other) == path
    keep("two", one)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["pass"], line["case"]) for line in lines] == [("one", "8"), ("one", "16"), ("two", "8")]
    assert {line["name"] for line in lines} == {"bench_x.test_growth"}
    assert lines[0]["provenance"] == sample_results.PROVENANCE
    assert lines[0]["measurements"][0]["samples"]
    assert list(path.parent.iterdir()) == [path]


def test_outside_of_asv_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("ASV_CONF_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    assert keep("one", sample_results.streamed_case(8)) is None
    refuse_another_machine()
    assert list(tmp_path.iterdir()) == []


LONG = 20_000_000


def keep_for_ever(run):
    """In a process of its own, whose id is returned."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in itertools.count():
            keep(f"{run}-{number}", CASE, CASE)
    finally:
        os._exit(1)


CASE = sample_results.streamed_case(8)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_passes(asv):
    """Each process is killed while it writes a long file: what is there is whole, and the next one goes on."""
    path = asv / "provenance" / HOST / "c0ffeec0ffee-py3.11.jsonl"
    sidecar.write_whole(path, json.dumps({"pass": "long", "text": "x" * LONG}) + "\n")
    chance, size = random.Random(0), path.stat().st_size
    for run in range(12):
        pid = keep_for_ever(run)
        while path.stat().st_size <= size:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.2))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        first, *passes = [json.loads(line)["pass"] for line in path.read_text().splitlines()]
        assert first == "long"
        assert {passes.count(each) for each in passes} == {2}
        size = path.stat().st_size
    assert {each.partition("-")[0] for each in passes} == set(map(str, range(12)))


# Which machine it is.


def test_a_machine_knows_itself_and_stays_itself():
    first, second = identity.identity(), identity.identity()
    assert first == second == json.loads(json.dumps(first))
    assert first["cpu"]
    assert first["num_cpus"] == os.cpu_count()
    assert first["memory_gib"] > 0
    assert first["reference"] is None


H100 = GpuState(name="NVIDIA H100", memory_total_bytes=85_520_809_984, driver_version="580.1")
NOW = {
    "cpu": "A Processor", "num_cpus": 8, "memory_gib": 64, "gpu": "NVIDIA H100", "gpu_memory_gib": 80,
    "driver": "580.1", "reference": None,
}  # fmt: skip


def test_a_gpu_is_part_of_its_machine():
    with use_driver(ScriptedDriver([H100])):
        found = identity.identity()
    assert (found["gpu"], found["gpu_memory_gib"], found["driver"]) == ("NVIDIA H100", 80, "580.1")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gpu": "NVIDIA H200"}, ["gpu was NVIDIA H100, is NVIDIA H200"]),
        ({"gpu": None, "driver": None}, ["gpu was NVIDIA H100, is None", "driver was 580.1, is None"]),
        ({"cpu": "Another", "num_cpus": 4}, ["cpu was A Processor, is Another", "num_cpus was 8, is 4"]),
        ({"memory_gib": 32}, ["memory was 64, is 32"]),
        ({"memory_gib": 63}, []),
        ({"gpu_memory_gib": 10}, ["gpu_memory was 80, is 10"]),
        ({"driver": "590.2"}, ["driver was 580.1, is 590.2"]),
        ({"reference": "c0ffee"}, ["reference was None, is c0ffee"]),
        ({}, []),
    ],
)
def test_what_makes_another_machine(change, told):
    assert differences(NOW, NOW | change) == told


def test_what_an_older_record_does_not_mention_was_not_there():
    older = {name: value for name, value in NOW.items() if name != "reference"}
    assert differences(older, NOW) == []
    assert differences(older, NOW | {"reference": "c0ffee"}) == ["reference was None, is c0ffee"]


@pytest.fixture
def seen(monkeypatch):
    """What this machine says of itself."""
    seen = dict(NOW)
    monkeypatch.setattr(identity, "identity", lambda reference=None: seen | {"reference": reference})
    return seen


def test_one_name_is_one_machine(asv, seen):
    path = asv / "provenance" / HOST / "machine.jsonl"
    for _ in range(2):
        refuse_another_machine()
    assert json.loads(path.read_text()) == NOW
    assert path.suffix != ".json", "asv would take it for results"
    seen["gpu"] = "NVIDIA H200"
    with pytest.raises(InstrumentError) as refused:
        refuse_another_machine()
    told = str(refused.value)
    assert f"under the name {HOST!r}" in told
    assert "gpu was NVIDIA H100, is NVIDIA H200" in told
    assert f"asv machine --machine {HOST}-2 --yes\n" in told
    assert f"--machine {HOST}-2\n" in told
    assert json.loads(path.read_text()) == NOW


def test_the_command_that_is_told_mends_it(asv, seen, monkeypatch):
    """What a person would type next, with the real asv."""
    refuse_another_machine()
    seen["num_cpus"] = 4
    for name in (HOST, f"{HOST}-2"):
        command = [sys.executable, "-m", "asv", "machine", "--machine", name, "--yes"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    ran_by(monkeypatch, "run", "--machine", f"{HOST}-2")
    refuse_another_machine()
    assert json.loads((asv / "provenance" / f"{HOST}-2" / "machine.jsonl").read_text())["num_cpus"] == 4
    ran_by(monkeypatch, "run")
    with pytest.raises(InstrumentError, match=f"--machine {HOST}-3"):
        refuse_another_machine()


def test_another_reference_is_another_machine(asv, seen):
    refuse_another_machine("c0ffee")
    refuse_another_machine("c0ffee")
    with pytest.raises(InstrumentError, match="reference was c0ffee, is None"):
        refuse_another_machine()


@pytest.mark.parametrize("text", ["", '{"cpu": "A Pro', "[1]", "7"])
def test_a_record_that_cannot_be_read_is_named_with_its_remedy(asv, seen, text):
    path = asv / "provenance" / HOST / "machine.jsonl"
    sidecar.write_whole(path, text)
    with pytest.raises(InstrumentError, match=f"remove it: rm {path}"):
        refuse_another_machine()


def test_folders_of_two_machines_lie_side_by_side(asv, seen, tmp_path, monkeypatch):
    """What one machine writes never touches what another one wrote: results are merged by copying."""
    written = {}
    for name in ("lab-1", "lab-2"):
        ran_by(monkeypatch, "run", "--machine", name)
        refuse_another_machine()
        keep("one", sample_results.streamed_case(8))
        shutil.copytree(asv, tmp_path / "merged", dirs_exist_ok=True)
        written[name] = sorted(path.relative_to(asv).parts for path in asv.rglob("*.jsonl"))
        shutil.rmtree(asv)
    assert {parts[1] for parts in written["lab-1"]} == {"lab-1"}
    merged = sorted(path.relative_to(tmp_path / "merged").parts for path in (tmp_path / "merged").rglob("*.jsonl"))
    assert merged == written["lab-1"] + written["lab-2"]


# What asv could not read.


def test_files_that_cannot_be_used_are_named_with_their_remedies(tmp_path):
    results = tmp_path / "with space"
    texts = {
        "benchmarks.json": '{"version": 1}',
        "lab/machine.json": '{"machine": "lab", "version": 1}',
        "lab/c0ffee00-good.json": '{"results": {}, "version": 2}',
        "lab/c0ffee01-cut.json": '{"results": {"b": [',
        "lab/c0ffee02-old.json": '{"results": {}, "version": 1}',
        "lab/c0ffee03-new.json": '{"results": {}, "version": 3}',
        "lab/c0ffee04-foreign.json": "[1, 2]",
        "lab/c0ffee05-empty.json": "",
        "old/machine.json": "{",
        "provenance/lab/c0ffee00-good.jsonl": '{"pass": 1}\n{"pass": 2}\n',
        "provenance/lab/c0ffee01-cut.jsonl": '{"pass": 1}\n{"pass"',
    }
    for name, text in texts.items():
        sidecar.write_whole(results / name, text)
    found = {each.path.relative_to(results).as_posix(): each for each in unreadable_results(results)}
    removed = ["lab/c0ffee01-cut.json", "lab/c0ffee04-foreign.json", "lab/c0ffee05-empty.json", "old/machine.json"]
    removed.append("provenance/lab/c0ffee01-cut.jsonl")
    assert {name: each.mend for name, each in found.items()} == {
        "benchmarks.json": "asv update",
        "lab/c0ffee02-old.json": "asv update",
        "lab/c0ffee03-new.json": "python -m pip install --upgrade asv",
        **{name: f"rm '{results / name}'" for name in removed},
    }
    assert found["lab/c0ffee02-old.json"].why == "of format 1, where asv reads 2"
    assert "cut off" in found["lab/c0ffee01-cut.json"].why


def test_no_results_are_no_trouble(tmp_path):
    assert unreadable_results(tmp_path / "nothing") == []
    (tmp_path / "benchmarks.json").write_text("{")
    assert [each.mend for each in unreadable_results(tmp_path)] == ["asv run --bench just-discover"]


def test_each_series_is_held_to_the_threshold_of_its_kind():
    """As asv matches them: by the beginning of a name, and the largest of several counts."""
    thresholds = Config.load(str(ROOT / "asv.conf.json")).regressions_thresholds
    for each in METRICS.values():
        name = f"bench_kv_cache.test_num_bytes.track_{each.asv_name}('cached', '16')@main"
        found = [threshold for pattern, threshold in thresholds.items() if re.match(pattern, name)]
        assert found == [1e-6 if each.is_exact else 0.05], each.name
