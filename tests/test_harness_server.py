"""The server as a child: started once, said where it is, always ended; and its own numbers beside its client's."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.harness.clients import closed_loop
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.errors import InstrumentError, MissingFeatureError, SourceError
from benchmarks.harness.loop import Plan
from benchmarks.harness.measure import Measure
from benchmarks.harness.over_http import OverHttp
from benchmarks.harness.slowed import Slowed
from benchmarks.harness.sources import nanoserve_server
from benchmarks.harness.sources.nanoserve_server import NanoserveServers, command, start
from benchmarks.harness.stepwise import Stepwise, StoppableClock

SERVES = "print('warming up', flush=True); print('nanoserve: serving m at http://127.0.0.1:7', flush=True); "
HTTP = {"via": "http", "cache": "paged", "kv_memory": "64MiB"}


def python(code):
    return [sys.executable, "-c", code]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_child_is_there_when_it_says_so_and_gone_when_it_is_closed():
    child = start(python(f"{SERVES}import sys; sys.stdin.read()"))
    assert (child.url, child.model) == ("http://127.0.0.1:7", "m")
    assert is_alive(child.process.pid)
    child.close()
    assert not is_alive(child.process.pid)


def test_a_child_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(nanoserve_server, "_END_S", 0.05)
    child = start(python(f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: 0); {SERVES}\nwhile 1: pass"))
    child.close()
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('no such model')", "the server ended with status 1: no such model"),
        ("pass", "the server ended with status 0"),
        ("import time; time.sleep(60)", "the server said nothing for 0.3 s"),
    ],
)
def test_a_child_that_never_serves_is_an_error_with_its_last_words(monkeypatch, code, said):
    monkeypatch.setattr(nanoserve_server, "_START_S", 0.3 if "sleep" in code else 30.0)
    with pytest.raises(SourceError, match=said):
        start(python(code))


def test_the_command_has_the_options_of_the_engine_and_the_very_package(tmp_path):
    told = command(tmp_path, "tiny", {"device": "cpu", "kv_memory": "1GiB"})
    assert told[told.index("serve") :] == [
        *("serve", "--model", "tiny", "--host", "127.0.0.1", "--port", "0"),
        *("--device", "cpu", "--kv-memory", "1GiB"),
    ]
    assert f"sys.path.insert(0, {str(tmp_path)!r})" in told[3]


def test_a_commit_without_a_server_is_a_missing_feature_and_no_failure(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingFeatureError, match="no server") as raised:
        NanoserveServers("tiny", {}).endpoint(cache="paged")
    assert raised.value.probe == "import nanoserve.server"


def test_a_child_ends_with_whoever_started_it(tmp_path):
    """Killed, so that nothing of it can close anything."""
    (tmp_path / "nanoserve").mkdir()
    (tmp_path / "nanoserve" / "__init__.py").touch()
    (tmp_path / "nanoserve" / "cli.py").write_text(f"def main():\n    {SERVES}\n    import time\n    time.sleep(60)\n")
    script = (
        "from pathlib import Path; from benchmarks.harness.sources.nanoserve_server import command, start; import time;"
        f"print(start(command(Path({str(tmp_path)!r}), 'm', {{}})).process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(python(script), stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    for _ in range(500):
        if not is_alive(pid):
            return
        time.sleep(0.01)
    pytest.fail("the child is still there")


def test_the_time_of_an_engine_that_runs_by_itself_is_one_turn_and_cannot_be_lengthened():
    class Real:
        ns = 0

        def now_ns(self):
            return self.ns

    class Runs:
        vocab_size, relative_tolerance, next_logits = 4, 0.0, None

        def serve(self, inbox, **arm):
            for step in range(3):
                real.ns += 10
                yield [step]

    real, turns = Real(), []
    clock = StoppableClock(real)
    stepwise = Stepwise(Runs(), clock, lambda: turns.append("begin"), lambda: turns.append("end"))
    assert list(stepwise.serve([], via="http")) == [[0], [1], [2]]
    assert (turns, clock.now_ns()) == (["begin", "end"], 30)
    turns.clear()
    assert len(list(stepwise.serve([]))) == 3
    assert turns == ["begin", "end"] * 4
    with pytest.raises(InstrumentError, match="an arm through HTTP has none"):
        Slowed(Runs(), 0.1, real).serve([], via="http")


@pytest.fixture(scope="module")
def served(tiny):
    from benchmarks.harness.sources.nanoserve import NanoserveSubject

    servers = NanoserveServers("tiny", {"device": "cpu", "dtype": "float32"})
    yield NanoserveSubject(tiny, "tiny"), servers
    servers.close()


@pytest.mark.slow
@pytest.mark.alone
def test_the_server_and_its_client_agree(served):
    """As many of everything; the client later than the server, but not by much more than HTTP costs."""
    model, servers = served
    clock = DeviceClock()
    over = OverHttp(model, servers.endpoint, clock)
    arms = {"http": HTTP, "engine": {name: value for name, value in HTTP.items() if name != "via"}}
    plan = Plan(name="agree", quantities=("ttft_s", "tpot_s", "e2e_s"), arms=arms, num_samples=4)
    measure = Measure(plan, over, clock, turn=lambda arm, n: over.looked_at(arm, arms[arm], n), tell=over.tell)
    measure.serve(closed_loop(4, 3, prompt_tokens=20, new_tokens=20))
    measure.close()
    over.close()
    told = measure.details["server"]["http"]
    assert {name: each["num_server"] for name, each in told.items()} == {"ttft_s": 48, "itl_s": 48 * 19, "e2e_s": 48}
    for name in ("ttft_s", "e2e_s"):
        assert 1 <= told[name]["client_mean_s"] / told[name]["server_mean_s"] < 20
    assert 1 / 20 < told["itl_s"]["client_mean_s"] / told["itl_s"]["server_mean_s"] < 20
    assert not [flag for flag in measure.flags if flag.kind in ("server", "short")]


@pytest.mark.slow
def test_a_server_with_the_same_options_is_started_once(served):
    _, servers = served
    same = [servers.endpoint(cache="paged", kv_memory="64MiB"), servers.endpoint(kv_memory="64MiB", cache="paged")]
    assert same[0] == same[1]
    assert len(servers._children) == 1
