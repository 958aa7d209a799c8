"""What an interrupted session leaves, and what `--resume` makes of it."""

import json
import shutil
from pathlib import Path

import pytest
from sample_results import streamed_case
from test_harness_session import Session

from benchmarks.harness.archive import read_results
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.resume import Journal
from benchmarks.harness.stash import Published

ROOT = Path(__file__).parents[1]
SETUP = {"model": "tiny", "samples": 6}
PUBLISHED = Published(streamed_case(8), (1.0, 2.0))

BENCHMARKS = """
import os
import pytest

@pytest.mark.arms(only={"cache": "contiguous"})
@pytest.mark.quantities("ttft_s")
@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_three(measure, tokens):
    if tokens == int(os.environ.get("BREAK_AT", 0)):
        raise KeyboardInterrupt
    measure.stream(prompt_tokens=tokens, new_tokens=2)
"""


def test_what_was_kept_is_read_back(tmp_path):
    path = tmp_path / "folder" / "unfinished.jsonl"
    Journal(path, SETUP).keep("a.py::test[8]", PUBLISHED)
    ((node, found),) = Journal(path, SETUP).read().items()
    assert node == "a.py::test[8]"
    assert found.result.as_dict() == PUBLISHED.result.as_dict()
    assert found.durations_s == (1.0, 2.0)


def test_a_resumed_journal_goes_on_and_a_new_one_begins_anew(tmp_path):
    path = tmp_path / "unfinished.jsonl"
    Journal(path, SETUP).keep("a", PUBLISHED)
    resumed = Journal(path, SETUP)
    resumed.read()
    resumed.keep("b", PUBLISHED)
    assert list(Journal(path, SETUP).read()) == ["a", "b"]
    Journal(path, SETUP).keep("c", PUBLISHED)
    assert list(Journal(path, SETUP).read()) == ["c"]


def test_half_a_line_is_a_case_that_is_measured_again(tmp_path):
    path = tmp_path / "unfinished.jsonl"
    journal = Journal(path, SETUP)
    for node in "ab":
        journal.keep(node, PUBLISHED)
    whole = path.read_text()
    path.write_text(whole[:-100])
    resumed = Journal(path, SETUP)
    assert list(resumed.read()) == ["a"]
    resumed.keep("c", PUBLISHED)
    assert list(Journal(path, SETUP).read()) == ["a", "c"]


def test_a_file_without_a_whole_line_is_another_session(tmp_path):
    path = tmp_path / "unfinished.jsonl"
    path.write_text('{"model": "ti')
    with pytest.raises(InstrumentError, match="another one: model None, now 'tiny'"):
        Journal(path, SETUP).read()


def test_another_setup_is_refused_and_named(tmp_path):
    path = tmp_path / "unfinished.jsonl"
    Journal(path, SETUP).keep("a", PUBLISHED)
    with pytest.raises(InstrumentError, match="another one: samples 6, now 3; measure in the same way"):
        Journal(path, SETUP | {"samples": 3}).read()


def test_nothing_to_resume_says_so(tmp_path):
    with pytest.raises(InstrumentError, match="nothing to resume: no session was interrupted"):
        Journal(tmp_path / "unfinished.jsonl", SETUP).read()


# Whole sessions.


@pytest.fixture
def project(tmp_path):
    shutil.copytree(
        ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__", "bench_*")
    )
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "benchmarks" / "bench_three.py").write_text(BENCHMARKS)
    return tmp_path


OPTIONS = ("benchmarks", "--benchmark-only", "--model", "tiny", "--samples", "2", "--benchmark-json=out.json")


@pytest.mark.slow
def test_an_interrupted_session_goes_on_where_it_was(project):
    journal = project / ".benchmarks" / "unfinished.jsonl"
    broken = Session(project, *OPTIONS, BREAK_AT="5")
    assert broken.status == pytest.ExitCode.INTERRUPTED
    assert f"go on with: pytest {' '.join(('-p no:cacheprovider -rA --tb=short', *OPTIONS))} --resume" in broken.text
    kept = [json.loads(line) for line in journal.read_text().splitlines()[1:]]

    refused = Session(project, *OPTIONS, "--resume", "--dtype", "bfloat16")
    assert refused.status == pytest.ExitCode.USAGE_ERROR
    assert "dtype 'auto', now 'bfloat16'" in refused.text
    assert journal.exists(), "a refusal loses nothing"

    resumed = Session(project, *OPTIONS, "--resume")
    assert resumed.status == 0, resumed.text
    results = {result.case: result for result in read_results([project / "out.json"])}
    assert sorted(results) == ["3", "4", "5"]
    for line in kept:
        result = results[line["result"]["case"]]
        told = [m.as_dict() for m in result.measurements if m.metric.has_ratio]
        assert told == line["result"]["measurements"]
        assert "resumed" in {flag.kind for flag in result.flags}
    assert "resumed" not in {flag.kind for flag in results["5"].flags}
    assert not journal.exists()


@pytest.mark.slow
def test_a_session_that_ends_leaves_no_journal_and_resuming_it_is_refused(project):
    assert Session(project, *OPTIONS).status == 0
    refused = Session(project, *OPTIONS, "--resume")
    assert refused.status == pytest.ExitCode.USAGE_ERROR, refused.text
    assert "nothing to resume" in refused.text
    assert "Traceback" not in refused.text
