"""A whole session against somebody else's server, in a process that cannot import nanoserve."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from child_process import inherited
from fake_completions import Completions

from benchmarks.harness.http_fixtures import kept_arms, why_left_out

ROOT = Path(__file__).parents[1]
HTTP = {"via": "http", "cache": "paged"}

WITHOUT_NANOSERVE = "import sys; sys.modules['nanoserve'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"


def session(server, *arguments):
    server.cuts, server.pause_s = [0], 0.001
    command = [sys.executable, "-c", WITHOUT_NANOSERVE, "-q", "-p", "no:cacheprovider", "--endpoint", server.url]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
        env=inherited() | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_suite_runs_against_any_url_without_nanoserve_and_says_what_it_leaves_out():
    with Completions() as server:
        server.refuses = ("ignore_eos", "return_token_ids")
        status, told = session(server, "benchmarks/bench_serving.py", "-k", "price or concurrency or prefix")
    assert status == 0, told
    assert "--endpoint leaves out, as it compares arms of which only http can be asked" in told
    assert "test_price_of_http[8]" in told
    assert {each["model"] for each in server.asked} == {"fake-model"}
    assert not any("ignore_eos" in each for each in server.asked[5:])
    assert all(len(each["prompt"]) > 1 for each in server.asked)


def test_only_one_servers_options_can_be_asked_of_an_endpoint():
    arms = {"a": HTTP, "b": HTTP | {"state": "cold"}, "c": HTTP | {"cache": "none"}, "d": {"cache": "paged"}}
    assert list(kept_arms(arms)) == ["a", "b"]
    assert why_left_out(arms, ("ttft_s",), ("measure",)) is None
    assert "only a, b" in why_left_out(arms, ("ttft_price",), ("measure",))
    assert why_left_out({"d": {}}, ("ttft_s",), ("measure",)) == "no arm goes through HTTP"
    assert why_left_out(arms, ("flops",), ("count_work",)) == "no arm goes through HTTP"


@pytest.mark.slow
def test_a_timed_session_says_which_endpoint_it_measured(tmp_path):
    file = tmp_path / "out.json"
    with Completions() as server:
        arguments = ["benchmarks/bench_serving.py", "-k", "concurrency and 1", "--benchmark-only", "--samples=2"]
        status, told = session(server, *arguments, f"--benchmark-json={file}")
    assert status == 0, told
    (stored,) = json.loads(file.read_text())["benchmarks"]
    provenance = stored["extra_info"]["provenance"]
    assert provenance["endpoint"] == {"url": server.url, "models": ["fake-model"], "notes": []}
    assert (provenance["package"], provenance["commit"], provenance["model"]) == (None, None, "fake-model")
    assert f"model fake-model at {server.url}" in told
