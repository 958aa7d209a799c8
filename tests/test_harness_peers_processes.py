"""Workers as processes: what the leader hears, how long it waits, and that nobody is left behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_process import inherited

from benchmarks.harness.ceilings import Ceilings
from benchmarks.harness.errors import PeerError
from benchmarks.harness.gate.progress import SILENT
from benchmarks.harness.peers import session
from benchmarks.harness.peers.columns import find_columns
from benchmarks.harness.peers.process import PeerWorker
from benchmarks.harness.peers.registry import Peer, find_peers
from benchmarks.harness.peers.session import Bench, Facts, run_session
from benchmarks.harness.peers.workers import protocol

FAKE = Path(__file__).with_name("fake_peer.py")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def worker(tmp_path):
    started = []

    def start(how=""):
        words = [sys.executable, "-S", "-E", str(FAKE), json.dumps({"how": how})]
        started.append(PeerWorker(words, inherited(), tmp_path / "log"))
        return started[-1]

    yield start
    for each in started:
        each.close()
        assert not each.is_alive


def test_a_worker_says_what_it_is_and_answers_with_stamps(worker):
    it = worker()
    assert it.about() == {"versions": {"fake": "1"}}
    reply = it.ask([[1, 2], [3, 4]], 3)
    assert (reply.sent_ns, reply.stamps_ns[1]) == (0, [10_000_000, 12_000_000, 14_000_000])
    assert it.ask([[1]], 1).token_ids == [[0]]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("dies", "ended with status 3; its log is "),
        ("crashes", "was ended by SIGABRT; its log is "),
        ("chatters", "said what is no answer: 'progress: 50 %"),
        ("refuses", "no batching API"),
        ("is short", r"gave \[2\] tokens where 1 times 3 were asked"),
        ("goes back", "stamped tokens out of order"),
    ],
)
def test_what_goes_wrong_is_told_and_only_a_broken_worker_is_lost(worker, how, why):
    it = worker(how)
    it.about()
    with pytest.raises(PeerError, match=why):
        it.ask([[1]], 3)
    assert it.is_alive == (how in ("refuses", "is short", "goes back"))


def test_one_that_hangs_is_killed_when_its_time_is_over(worker):
    it = worker("hangs")
    it.about()
    with pytest.raises(PeerError, match="said nothing for 0 s and was killed"):
        it.ask([[1]], 3, patience_s=0.2)
    assert not it.is_alive


def test_one_that_does_not_load_says_why(worker):
    with pytest.raises(PeerError, match="OSError: no such weights"):
        worker("does not load").about()


def test_closing_ends_what_a_worker_has_started(tmp_path):
    script = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    script += 'print(\'{"ready": {"child": %d}}\' % p.pid, flush=True); sys.stdin.read()'
    it = PeerWorker([sys.executable, "-c", script], inherited(), tmp_path / "log")
    child = it.about()["child"]
    it.close()
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline, "its child outlived it"
        time.sleep(0.01)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# The worker's side.


def test_stamps_are_taken_as_tokens_come_out(monkeypatch):
    monkeypatch.setattr(protocol.time, "perf_counter_ns", iter(range(100)).__next__)

    def serve(prompts, num_new_tokens, emit):
        for i in range(num_new_tokens):
            for place in range(len(prompts)):
                emit(place, 10 * place + i)

    found = protocol.answer(serve, {"prompts": [[1], [2]], "num_new_tokens": 2})
    assert found == {"sent_ns": 0, "stamps_ns": [[1, 3], [2, 4]], "token_ids": [[0, 1], [10, 11]]}


def test_a_failure_inside_an_engine_is_one_line(capsys):
    def serve(prompts, num_new_tokens, emit):
        raise RuntimeError("first\nsecond")

    assert protocol.answer(serve, {"prompts": [[1]], "num_new_tokens": 1}) == {"failed": "RuntimeError: first"}
    assert "second" in capsys.readouterr().err  # the rest is in the log


def test_what_an_engine_prints_does_not_reach_the_leader(tmp_path):
    script = "from benchmarks.harness.peers.workers.protocol import work; import os\n"
    script += "def serve(prompts, n, emit): os.system('echo from a child'); print('hello'); emit(0, 5)\n"
    script += "work(lambda settings: (serve, settings))"
    it = PeerWorker([sys.executable, "-c", script, '{"a": 1}'], inherited() | {"PYTHONPATH": str(ROOT)}, tmp_path / "l")
    assert it.about() == {"a": 1}
    assert it.ask([[1]], 1).token_ids == [[5]]
    it.close()
    assert {"hello", "from a child"} <= set((tmp_path / "l").read_text().split("\n"))


@pytest.mark.parametrize(
    ("last", "prompt", "num"), [([1, 2, 3], [1, 2, 9], 2), ([1, 2], [1, 2], 1), ([], [1], 0), ([7], [1, 7], 0)]
)
def test_the_last_id_of_a_prompt_is_always_run(last, prompt, num):
    assert protocol.num_shared(last, prompt) == num


def test_workers_need_nothing_but_the_standard_library_until_they_load():
    names = [f"benchmarks.harness.peers.workers.{each}" for each in ("on_llama_cpp", "on_openvino", "on_vllm")]
    script = f"import importlib, sys; [importlib.import_module(n) for n in {[*names, find_peers([])[0].module]!r}]; "
    script += "print(*{n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names))"
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {script}"],
        capture_output=True, text=True, check=True, env=inherited(),
    )  # fmt: skip
    assert set(done.stdout.split()) <= {"__main__", "benchmarks"}


# A whole session with scripted workers.


class Environments:
    """All peers are the fake one, in this interpreter."""

    def python(self, peer):
        return Path(sys.executable)

    def environ(self, peer):
        return {}


class Store:
    def path_for(self, peer, python):
        if peer.name == "unconverted":
            raise PeerError("its weights were not converted: planted")
        return Path("weights")


def fake(name, how="", **options):
    return Peer(name=name, what="", module="fake_peer", weights="folder", settings={"how": how}, **options)


def test_a_session_goes_on_without_those_that_fail(tmp_path, monkeypatch):
    class Still(Ceilings):
        def __init__(self, best):
            self.read_bytes_per_s, self.flops_per_s = best, best

        def look(self):
            pass

    class Cost:
        def read_bytes(self, context):
            return 1.0

        def prefill_flops(self, num_tokens):
            return 1.0

    monkeypatch.setattr(session, "ROOT", FAKE.parent)
    monkeypatch.setattr("benchmarks.harness.peers.host.REST_S", 0.01)
    about = {"model": "m", "num_threads": 1, "seed": 0, "cpu": "", "commit": None}
    bench = Bench(
        Environments(), Store(), Facts(100, Cost(), lambda: [Still(2e9), Still(1e9)], about), tmp_path, SILENT
    )
    peers = [fake("ours", is_ours=True), fake("good"), fake("bad", "dies"), fake("mute", "does not load")]
    found = run_session([*peers, fake("unconverted")], find_columns(["itl_16", "ttft_64"]), bench, 2)
    itl = next(column for column in found["columns"] if column["name"] == "itl_16")
    assert {name: cell["median"] for name, cell in itl["cells"].items()} == {
        "ours": 2, "good": 2, "bad": None, "mute": None, "unconverted": None,
    }  # fmt: skip
    assert itl["ratios"][0]["value"] == 1
    assert "ended with status 3" in itl["cells"]["bad"]["failure"]
    assert itl["cells"]["mute"]["failure"] == "OSError: no such weights"
    assert itl["cells"]["unconverted"]["failure"] == "its weights were not converted: planted"
    assert found["host"]["read_bytes_per_s"] == [2e9] * 3  # whichever dtype is read fastest
    assert found["host"]["flops_per_s"] == [1e9] * 3


def test_where_nobody_starts_nothing_is_measured(tmp_path):
    bench = Bench(Environments(), Store(), Facts(9, None, None, {"model": "m", "num_threads": 1}), tmp_path, SILENT)
    with pytest.raises(PeerError, match="no peer has started: unconverted its weights were not converted"):
        run_session([fake("unconverted")], find_columns([]), bench, 1)


def test_a_worker_gets_our_threads_and_its_own_variables(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    found = session.environment({"OWN": "1"}, {"num_threads": 3})
    assert (found["OMP_NUM_THREADS"], found["OWN"], found["HF_HUB_OFFLINE"]) == ("3", "1", "1")
    assert found["PYTHONPATH"] == str(ROOT)
    assert found["PATH"] == os.environ["PATH"]


# The real ones that the development environment has.


@pytest.mark.slow
def test_nanoserve_and_transformers_give_the_same_tokens_alone_together_and_behind_a_prefix(tmp_path):
    from benchmarks.harness.peers.columns import Scene
    from benchmarks.harness.peers.install import Environments as Real
    from benchmarks.harness.peers.rounds import Prompts, measure
    from benchmarks.harness.peers.weights import WeightStore
    from benchmarks.harness.sources.nanoserve_export import export_folder

    store = WeightStore(tmp_path, "tiny", export_folder, None, lambda text: None)
    bench = Bench(Real(tmp_path), store, Facts(512, None, None, {"model": "tiny", "num_threads": 1}), tmp_path, SILENT)
    scenes = [
        Scene(name="alone", prompt_tokens=16, new_tokens=9),
        Scene(name="batch", prompt_tokens=16, new_tokens=9, num_requests=3),
        Scene(name="prefix", prompt_tokens=96, prefix_tokens=64, new_tokens=4),
    ]
    with session.started(find_peers(["nanoserve", "transformers"]), bench) as running:
        assert running.failures == {}
        turns = measure(running.workers, scenes, rounds=2, prompts=Prompts(512, 0), seed=0)
    assert [turn.failure for turn in turns] == [""] * 12
    firsts = {(turn.round, turn.scene.name, turn.peer): [r.token_ids[0][0] for r in turn.replies] for turn in turns}
    for number in (1, 2):
        for scene in scenes:
            ours, theirs = (firsts[number, scene.name, peer] for peer in ("nanoserve", "transformers"))
            assert ours == theirs
