"""Counts of work: closed forms to the last FLOP, the same numbers every time, and faults that a clock misses."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks.harness.counters import count_work
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.exact import exact_changes, histogram_changes, is_red
from benchmarks.harness.gpu.nvidia import KERNEL_LAUNCH
from benchmarks.harness.token_counts import Step, count_tokens
from nanoserve import EngineConfig, SamplingParams
from nanoserve.cache.contiguous import ContiguousCache
from nanoserve.catalog import SHAPES
from nanoserve.config import ModelConfig
from nanoserve.engine import Engine
from nanoserve.models.llama import DecoderLayer, Llama
from nanoserve.ops import TorchOps
from nanoserve.weights import load_model

OTHER = ModelConfig(
    vocab_size=96,
    hidden_size=40,
    intermediate_size=56,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=8,
    max_context_tokens=128,
)
NUM_LAYERS = SHAPES["tiny"].num_layers


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """Each count collects garbage first; what the session has loaded by now need not be looked through."""
    counted(lambda: X + 1)
    gc.freeze()
    yield
    gc.unfreeze()


def counted(call, **options):
    return count_work(call, **options)[1]


def forward(model, num_new, num_cached=0):
    """The call that runs `num_new` positions after `num_cached` stored ones, down to the last one's logits."""
    cache = ContiguousCache(model.config, num_cached + num_new + 1, torch.float32, torch.device("cpu"))
    token_ids, positions = torch.arange(num_new), torch.arange(num_cached, num_cached + num_new)
    cache.num_cached = num_cached

    @torch.inference_mode()
    def run():
        return model.compute_logits(model(token_ids, positions, cache)[-1:])

    return run


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.model


@pytest.fixture(scope="module")
def base(model):
    """The work of a prefill of 16 and of the decode step after it."""
    return counted(forward(model, 16)), counted(forward(model, 1, 16))


def changes(base, work):
    return {change.key: change.difference for change in exact_changes(base.counts(), work.counts())}


# Closed forms.


def matmul_parameters(config):
    """Of one layer, and of the head."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    return attention + 3 * config.hidden_size * config.intermediate_size, config.vocab_size * config.hidden_size


@pytest.mark.parametrize("config", [SHAPES["tiny"], OTHER], ids=["tiny", "other"])
@pytest.mark.parametrize(("num_new", "num_cached"), [(1, 0), (16, 0), (1, 16), (1, 100), (5, 7)])
def test_flops_are_two_per_weight_and_position_and_four_per_pair_that_attends(config, num_new, num_cached):
    layer, head = matmul_parameters(config)
    attention = 4 * num_new * (num_cached + num_new) * config.num_heads * config.head_dim
    expected = config.num_layers * (2 * num_new * layer + attention) + 2 * head
    assert counted(forward(Llama(config), num_new, num_cached)).flops == expected


def test_logits_are_all_that_a_forward_leaves_behind(model, base):
    for work in base:
        assert work.retained_bytes == model.config.vocab_size * 4 <= work.peak_bytes <= work.allocated_bytes
        assert work.num_operators == sum(work.operators.values())
        assert (work.num_kernel_launches, work.num_graph_launches, work.num_graph_breaks) == (None, None, None)


LEFT, RIGHT, VECTOR = torch.ones(3, 4), torch.ones(4, 5), torch.ones(4)


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (lambda: LEFT @ RIGHT, 2 * 3 * 4 * 5),
        (lambda: F.linear(LEFT, RIGHT.T, torch.ones(5)), 2 * 3 * 4 * 5),
        (lambda: torch.mm(LEFT, RIGHT, out=torch.empty(0)), 2 * 3 * 4 * 5),
        (lambda: torch.ones(3, 5).addmm_(LEFT, RIGHT), 2 * 3 * 4 * 5),
        (lambda: LEFT.expand(2, 3, 4) @ RIGHT.expand(2, 4, 5), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.ones(2, 3, 5).baddbmm_(LEFT.expand(2, 3, 4), RIGHT.expand(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.addbmm(torch.ones(3, 5), LEFT.expand(2, 3, 4), RIGHT.expand(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: LEFT @ VECTOR, 2 * 3 * 4),
        (lambda: VECTOR @ RIGHT, 2 * 4 * 5),
        (lambda: torch.addmv(torch.ones(3), LEFT, VECTOR), 2 * 3 * 4),
        (lambda: VECTOR @ VECTOR, 2 * 4),
        (lambda: LEFT + LEFT, 0),
    ],
)
def test_a_product_costs_the_same_however_it_is_written(call, flops):
    assert counted(call).flops == flops


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "MATH"])
def test_attention_costs_the_same_in_every_kernel(backend):
    queries, keys = torch.ones(1, 4, 3, 16), torch.ones(1, 2, 7, 16)

    def attend():
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return F.scaled_dot_product_attention(queries, keys, keys, enable_gqa=True)

    assert counted(attend).flops == 4 * 4 * 3 * 7 * 16


# What counts as an operator, and what as memory.


def test_a_composite_operator_counts_as_its_parts_in_every_mode():
    expected = {"aten.mm.default": 1, "aten.t.default": 1}
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        assert counted(mode()(lambda: F.linear(LEFT, torch.ones(5, 4)))).operators == expected | {
            "aten.ones.default": 1
        }


X = torch.ones(100)
KEPT = []


@pytest.mark.parametrize(
    ("call", "allocated", "peak", "retained"),
    [
        (lambda: X[3:].view(-1, 1).T, 0, 0, 0),
        (lambda: X.mul_(1), 0, 0, 0),
        (lambda: torch.add(X, 1, out=X), 0, 0, 0),
        (lambda: X + 1, 400, 400, 400),
        (lambda: (X + 1)[:5], 400, 400, 400),
        (lambda: X + 1 + 1 + 1, 1200, 800, 400),
        (lambda: [X + 1 for _ in range(3)], 1200, 1200, 1200),
        (lambda: (X + 1, None)[1], 400, 400, 0),
        (lambda: torch.add(X, 1, out=torch.empty(0)), 400, 400, 400),
        (lambda: torch.empty(50).resize_(100), 600, 400, 400),
        (lambda: torch.tensor([1, 2, 3]), 24, 24, 24),
        (lambda: KEPT.append(X + 1), 400, 400, 400),
        (lambda: X.sum().item(), 4, 4, 0),
        (lambda: LEFT.to_sparse().to_dense(), 48, 48, 48),
    ],
)
def test_memory(call, allocated, peak, retained):
    work = counted(call)
    assert (work.allocated_bytes, work.peak_bytes, work.retained_bytes) == (allocated, peak, retained)


def test_a_tensor_in_a_reference_cycle_is_held_whenever_the_collector_would_have_run():
    def run():
        for _ in range(50):
            cycle = [X + 1]
            cycle.append(cycle)

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        assert {counted(run).peak_bytes for _ in range(3)} == {50 * 400}
    finally:
        gc.set_threshold(*thresholds)


# The same numbers every time.


def told(loaded, warmups=1):
    """A prefill and a decode step, through the engine, as JSON knows them."""
    engine, params = Engine(loaded), SamplingParams(max_new_tokens=2)
    work = counted(lambda: engine.generate([list(range(16))], params), warmups=warmups)
    return work.counts() | {"operators": work.operators}


def test_twenty_repeats_are_identical(tiny):
    first, others = told(tiny), []
    for repeat in range(20):
        others.append(torch.ones(1000 * repeat))
        if repeat % 5 == 0:
            gc.collect()
        assert told(tiny, warmups=0) == first


@pytest.mark.slow
def test_a_fresh_process_with_other_threads_and_another_hash_seed_counts_the_same(tiny):
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['in_a_fresh_process']()))"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code, __file__]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [told(tiny)] * 2


def in_a_fresh_process():
    loaded = load_model(EngineConfig(model="tiny", device="cpu", dtype="float32"))
    return [told(loaded) for _ in range(2)]


# Calls that change something.


def test_what_is_made_at_the_first_call_is_left_to_the_warm_ups():
    def make():
        made = []
        return lambda: made[0] if made else made.append(X + 1)

    assert [counted(make(), warmups=warmups).num_operators for warmups in (0, 1, 2)] == [1, 0, 0]


def test_each_call_is_prepared_and_preparing_is_not_counted():
    log = []
    result, work = count_work(lambda: log.append("call") or X + 1, prepare=lambda: log.append(X * 2), warmups=2)
    assert [each if isinstance(each, str) else "prepare" for each in log] == ["prepare", "call"] * 3
    assert torch.equal(result, X + 1)
    assert work.operators == {"aten.add.Tensor": 1}


def test_a_call_that_fails_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError):
        count_work(lambda: X + 1 / 0, warmups=0)
    assert gc.isenabled()
    assert counted(lambda: X + 1).num_operators == 1


@pytest.mark.parametrize("device", ["mps", "CPU", "cuda:", "gpu"])
def test_an_unknown_device_is_refused_before_anything_runs(device):
    with pytest.raises(InstrumentError, match=f"'{device}' cannot be counted; choose from: cpu, cuda, cuda:N"):
        count_work(lambda: pytest.fail("ran"), device=device)


def test_graph_breaks_are_those_of_what_was_compiled_meanwhile():
    def twice(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    compiled = torch.compile(twice, backend="eager")
    assert counted(lambda: X + 1).num_graph_breaks is None
    assert counted(lambda: compiled(X)).num_graph_breaks == 1
    assert "num_graph_breaks" not in counted(lambda: compiled(X)).counts()


# CUDA, as far as a machine without one can tell: which numbers are asked for, when, and what is made of them.


@pytest.fixture
def cuda(monkeypatch):
    """A device that had 1000 bytes in use, whose every call takes 300, holds 200 at most and keeps 50."""
    log, stats = [], {"current": 1000, "allocated": 9000, "peak": 7777}
    events = [
        "cudaLaunchKernel",
        "aten::mm",
        "cuLaunchKernelEx",
        "cudaMemcpyAsync",
        "cudaGraphLaunch",
        "void gemm<f>()",
    ]

    def reset(_):
        stats["peak"] = stats["current"]

    def call():
        log.append("call")
        peak = max(stats["peak"], stats["current"] + 200)
        stats.update(current=stats["current"] + 50, allocated=stats["allocated"] + 300, peak=peak)
        return X + 1

    class Profiler:
        def __init__(self, activities):
            self.events = lambda: [SimpleNamespace(name=name) for name in events]

        def __enter__(self):
            log.append("profile")
            return self

        def __exit__(self, *_):
            log.append("end")

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"wait {device}"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda _: {f"allocated_bytes.all.{name}": value for name, value in stats.items()}
    )
    return SimpleNamespace(call=call, log=log)


def test_on_cuda_bytes_are_the_allocators_and_launches_the_profilers(cuda):
    work = counted(cuda.call, device="cuda:1")
    assert (work.allocated_bytes, work.peak_bytes, work.retained_bytes) == (300, 200, 50)
    assert (work.num_kernel_launches, work.num_graph_launches, work.num_operators) == (3, 1, 1)
    assert cuda.log == ["call", "profile", "wait cuda:1", "call", "wait cuda:1", "end", "call"]


@pytest.mark.parametrize(
    ("name", "is_launch"),
    [
        ("cudaLaunchKernelExC", True),
        ("cudaLaunchKernelExC_v11060", True),
        ("cudaLaunchCooperativeKernel", True),
        ("cuLaunchKernel", True),
        ("cudaLaunchHostFunc", False),
        ("cudaStreamSynchronize", False),
        ("my_cudaLaunchKernel", False),
    ],
)
def test_which_events_put_work_on_the_device(name, is_launch):
    assert (KERNEL_LAUNCH.fullmatch(name) is not None) == is_launch


# Planted faults: the gate has to be seen going red.


def test_an_unchanged_copy_is_green(tiny, base):
    copy = Llama(tiny.config)
    copy.load_state_dict(tiny.model.state_dict())
    for work, again in zip(base, (counted(forward(copy, 16)), counted(forward(copy, 1, 16))), strict=True):
        assert exact_changes(work.counts(), again.counts()) == []


def plant_in_each_layer(monkeypatch, fault):
    original = DecoderLayer.forward
    monkeypatch.setattr(DecoderLayer, "forward", lambda *args: fault(original(*args)))


@pytest.mark.usefixtures("_one_thread")
def test_one_cheap_operator_per_layer_is_red_where_a_clock_sees_nothing(monkeypatch, model, base):
    decode = forward(model, 1, 16)
    with monkeypatch.context() as planted:
        plant_in_each_layer(planted, lambda hidden: hidden + 0)
        works = counted(forward(model, 16)), counted(decode)
    for before, after in zip(base, works, strict=True):
        found = exact_changes(before.counts(), after.counts())
        assert is_red(found)
        assert {change.key: change.difference for change in found}["num_operators"] == NUM_LAYERS
        (added,) = histogram_changes(before.operators, after.operators)
        assert (added.key, added.difference) == ("aten.add.Tensor", NUM_LAYERS)
    slow, fast = times_in_turns(decode, lambda hidden: hidden + 0)
    assert quantiles(slow, n=10)[0] < quantiles(fast, n=10)[-1]


@pytest.fixture
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def times_in_turns(call, fault, num_pairs=41):
    """Nanoseconds of the call with the fault in each layer, and without; the two take turns."""
    times = [], []
    for turn in range(2 * num_pairs):
        with pytest.MonkeyPatch.context() as monkeypatch:
            plant_in_each_layer(monkeypatch, (fault, lambda hidden: hidden)[turn % 2])
            call()
            start = time.perf_counter_ns()
            call()
            times[turn % 2].append(time.perf_counter_ns() - start)
    return times


def test_memory_that_is_kept_is_red(monkeypatch, model, base):
    kept = []
    plant_in_each_layer(monkeypatch, lambda hidden: kept.append(hidden.clone()) or hidden)
    num_bytes = NUM_LAYERS * 16 * model.config.hidden_size * 4
    found = changes(base[0], counted(forward(model, 16)))
    assert (found["allocated_bytes"], found["retained_bytes"]) == (num_bytes, num_bytes)
    assert found["num_operators"] == NUM_LAYERS
    assert "flops" not in found


def test_a_copy_where_one_could_write_in_place_is_red_in_bytes_alone(monkeypatch, model, base):
    monkeypatch.setattr(TorchOps, "gate", lambda self, gate, up: F.silu(gate) * up)
    copied = counted(forward(model, 16))
    found = exact_changes(base[0].counts(), copied.counts())
    assert {change.key: change.difference for change in found} == {
        "allocated_bytes": NUM_LAYERS * 16 * model.config.intermediate_size * 4,
        "peak_bytes": 16 * model.config.intermediate_size * 4,
    }
    assert is_red(found)
    assert not is_red(exact_changes(copied.counts(), base[0].counts()))


def test_a_product_that_is_one_wider_is_red(base):
    config = SHAPES["tiny"]
    wider = Llama(dataclasses.replace(config, intermediate_size=config.intermediate_size + 1))
    for before, num_new, num_cached in zip(base, (16, 1), (0, 16), strict=True):
        found = changes(before, counted(forward(wider, num_new, num_cached)))
        assert found["flops"] == NUM_LAYERS * 3 * 2 * config.hidden_size * num_new
        assert "num_operators" not in found


def test_a_forward_too_many_is_red(model, base):
    decode = forward(model, 1, 16)
    work = counted(lambda: decode() * 0 + decode())
    assert changes(base[1], work)["flops"] == base[1].flops
    assert changes(base[1], work)["num_operators"] == base[1].num_operators + 2


@pytest.mark.parametrize("cache", ["contiguous", "none"])
def test_what_the_engine_tells_of_its_steps(scripted, cache):
    engine = Engine(scripted([7, 8, 9, 10]), cache=cache)
    events = list(engine.stream([1, 2, 3], SamplingParams(max_new_tokens=4)))
    counts = count_tokens([Step(num_prefilled=e.num_prefilled, num_cached=e.num_cached) for e in events], 3)
    assert counts.num_recomputed == {"contiguous": 0, "none": 3 + 4 + 5}[cache]
    assert (counts.num_forwards, counts.num_prefilled, counts.num_decoded, counts.num_tokens) == (4, 3, 3, 4)
    run = len(engine.loaded.model.positions_run)
    assert counts.num_prefilled + counts.num_decoded + counts.num_recomputed == run
