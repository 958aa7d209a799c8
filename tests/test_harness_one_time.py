"""What is paid once: torch's own compiler, and graphs that are captured by a class which only says that it captures."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from recorders import ScriptedCuda

from benchmarks.harness import measure, one_time
from benchmarks.harness.loop import Plan, WarmUp
from benchmarks.harness.measure import Measure
from benchmarks.harness.one_time import Account, Captures, Kernels, OneTime, spent, told_together
from benchmarks.harness.timing import Emission
from nanoserve.replay import CudaGraphRecorder

ONE = OneTime(num_compilations=1, compile_s=0.5)
CAPTURE = OneTime(num_captures=1, capture_s=0.25)


class ScriptedClock:
    ns = 0

    def now_ns(self):
        return self.ns


class CompilingSubject:
    """Streams two tokens, of which the first is computed by `function`, at the length of the prompt."""

    vocab_size, relative_tolerance = 100, 0.0

    def __init__(self, clock, function):
        self.clock, self.function = clock, function
        self.step_ms = iter([50])

    def forget(self, **arm):
        pass

    def next_logits(self, token_ids):
        raise AssertionError("one arm agrees with itself")

    def stream(self, prompt_ids, num_new_tokens, **arm):
        self.function(torch.ones(len(prompt_ids)))
        self.clock.ns += next(self.step_ms, 10) * 1_000_000
        yield Emission(token_ids=(1,))
        yield Emission(token_ids=(2,), finish_reason="length")


@pytest.fixture
def compiled():
    """A function as `torch.compile` makes it, without a backend's own work; compiled anew for each length."""
    torch._dynamo.reset()
    yield torch.compile(lambda numbers: numbers + 1, backend="eager", dynamic=False)
    torch._dynamo.reset()


def measured(function, num_warmups, turn=lambda arm, number: contextlib.nullcontext()):
    clock = ScriptedClock()
    warm_up = WarmUp(max_runs=num_warmups, max_s=60.0)
    plan = Plan(name="x", quantities=("ttft_s",), arms={"only": {}}, num_samples=3, warm_up=warm_up)
    done = Measure(plan, CompilingSubject(clock, function), clock, turn=turn)
    done.stream(prompt_tokens=8, new_tokens=2)
    done.close()
    return done


# The accounts.


def test_compilations_are_counted_and_timed_and_a_second_call_is_none(compiled):
    before = spent()
    compiled(torch.ones(3))
    first = spent().since(before)
    compiled(torch.ones(3))
    assert first.num_compilations == 1
    assert first.compile_s > 0
    assert spent().since(before) == first


def test_an_account_that_torch_emptied_begins_anew(compiled):
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    before = spent()
    torch._dynamo.reset()
    torch._dynamo.utils.compilation_time_metrics.clear()
    compiled(torch.ones(3))
    assert spent().since(before).num_compilations == 1


def test_without_torchs_compiler_nothing_was_compiled_and_nothing_is_loaded(monkeypatch):
    monkeypatch.delitem(one_time.sys.modules, "torch._dynamo.utils", raising=False)
    assert (spent().num_compilations, spent().compile_s) == (0, 0)
    assert "torch._dynamo.utils" not in one_time.sys.modules


class Graph:
    """Captures nothing."""

    def capture_begin(self, pool=None):
        self.log = [pool]

    def capture_end(self):
        self.log.append("end")


def test_captures_are_counted_and_timed_while_they_are_watched_and_the_class_is_as_before_afterwards():
    now, own = [0.0], (Graph.capture_begin, Graph.capture_end)
    captures = Captures(lambda: now[0])
    with captures.watching(Graph):
        for took_s in (0.5, 0.25):
            graph = Graph()
            graph.capture_begin(pool="shared")
            now[0] += took_s
            graph.capture_end()
            now[0] += 10
            assert graph.log == ["shared", "end"]
    Graph().capture_begin()
    assert (captures.num, captures.seconds) == (2, 0.75)
    assert (Graph.capture_begin, Graph.capture_end) == own


def test_a_capture_that_fails_still_leaves_the_class_as_it_was():
    class Failing(Graph):
        def capture_end(self):
            raise RuntimeError("a forbidden call")

    captures, own, graph = Captures(), Failing.capture_end, Failing()
    with captures.watching(Failing):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="forbidden"):
            graph.capture_end()
    assert (captures.num, Failing.capture_end) == (1, own)


def test_captures_of_an_engines_recorder_are_seen():
    """As torch's own context captures: between a begin and an end of the graph's class."""
    cuda = ScriptedCuda()
    cuda.CUDAGraph, cuda.graph = Graph, lambda graph, **_: captured(graph)
    captures = Captures()
    with captures.watching(Graph):
        CudaGraphRecorder(torch.device("cpu"), cuda).record(lambda: None)
    assert captures.num == 1


@contextlib.contextmanager
def captured(graph):
    graph.capture_begin()
    yield
    graph.capture_end()


def test_kernels_that_triton_compiles_are_counted_and_timed_and_what_lies_on_disk_is_not():
    heard, kernels = [], Kernels()
    knobs = SimpleNamespace(compilation=SimpleNamespace(listener=lambda **what: heard.append(what["src"])))
    own = knobs.compilation.listener
    with kernels.listening(knobs):
        for src, is_cached in (("a", False), ("a", True), ("b", False)):
            knobs.compilation.listener(src=src, times=SimpleNamespace(total=250_000), cache_hit=is_cached)
    assert (kernels.num, kernels.seconds, heard) == (2, 0.5, ["a", "a", "b"])
    assert knobs.compilation.listener is own


def test_tritons_own_knobs_are_such():
    knobs = pytest.importorskip("triton.knobs")
    own = knobs.compilation.listener
    with Kernels().listening(knobs):
        assert knobs.compilation.listener is not own
    assert knobs.compilation.listener is own


# In a benchmark.


def test_what_a_warm_up_compiles_is_told_apart_and_is_no_doubt(compiled):
    done = measured(compiled, num_warmups=2)
    told = done.details["warm_up"]
    assert (told["num_compilations"], told["num_captures"]) == (1, 0)
    assert told["compile_s"] > 0
    assert told["first_run_excess_s"] == {"only": pytest.approx(0.040)}
    assert [flag for flag in done.flags if flag.kind == "one-time"] == []
    assert "one_time_in_samples" not in done.details


def test_a_compilation_in_a_sample_is_a_doubt_about_its_arm(compiled):
    done = measured(compiled, num_warmups=0)
    [flag] = [flag for flag in done.flags if flag.kind == "one-time"]
    assert (flag.arm, flag.what[:14]) == ("only", "1 compilation ")
    assert done.details["one_time_in_samples"]["only"]["num_compilations"] == 1
    assert "warm_up" not in done.details


def test_what_opens_a_run_is_no_part_of_its_sample(compiled):
    def turn(arm, number):
        compiled(torch.ones(8))
        return contextlib.nullcontext()

    done = measured(compiled, num_warmups=0, turn=turn)
    assert done.details["warm_up"]["num_compilations"] == 1
    assert "one_time_in_samples" not in done.details


def test_where_nothing_is_paid_once_nothing_is_told():
    done = measured(lambda numbers: numbers, num_warmups=2)
    assert set(done.details["warm_up"]) == {"num_runs", "is_settled", "first_run_excess_s"}
    assert [flag.kind for flag in done.flags] == ["warm-up"]  # the first of two runs was the slower one


def test_samples_are_taken_off_the_whole_and_what_remains_is_the_warm_up():
    sums = iter([OneTime(), ONE, ONE + CAPTURE, ONE + CAPTURE + ONE])
    account = Account(lambda: next(sums))
    with account.around("a", None):
        pass
    with account.around("a", 0):
        pass
    assert account.in_samples == {"a": CAPTURE}
    assert account.in_warm_up() == OneTime(num_compilations=2, compile_s=1.0)


def test_the_loop_reads_no_account_inside_what_is_timed(monkeypatch):
    """The clock of a run starts after the account was read, and is read last before the account is read again."""
    log = []

    class Clock(ScriptedClock):
        def now_ns(self):
            log.append("clock")
            return 0

    monkeypatch.setattr(measure, "Account", lambda: Account(lambda: log.append("account") or OneTime()))
    clock = Clock()
    plan = Plan(name="x", quantities=("ttft_s",), arms={"only": {}}, num_samples=2)
    Measure(plan, CompilingSubject(clock, lambda _: None), clock).stream(prompt_tokens=8, new_tokens=2)
    reads = [place for place, what in enumerate(log) if what == "account"]
    assert len(reads) == 5  # when it is opened, and on either side of two samples
    assert set(log[reads[1] + 1 : reads[2]]) == set(log[reads[3] + 1 : reads[4]]) == {"clock"}
    assert log[reads[2] + 1 : reads[3]] == []


# In words.


def test_words():
    assert str(ONE) == "1 compilation (0.5 s)"
    assert str(ONE + ONE + CAPTURE) == "2 compilations (1 s) and 1 CUDA graph capture (0.25 s)"
    both = {"warm_up": {"num_runs": 2, **ONE.as_dict()}, "one_time_in_samples": {"a": CAPTURE.as_dict()}}
    assert str(ONE + CAPTURE + OneTime(num_kernels=3, kernel_s=2.0)) == (
        "1 compilation (0.5 s), 3 kernel compilations (2 s) and 1 CUDA graph capture (0.25 s)"
    )
    assert told_together([both, both, {}]) == (
        "2 compilations (1 s) in warm-up; 2 CUDA graph captures (0.5 s) inside samples"
    )
    assert told_together([{}, {"warm_up": {"num_runs": 2}}]) == ""
