"""Recorded decode steps have the tokens of eager ones, whoever joins, leaves or makes room; and what goes wrong."""

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch
from many_requests import CPU, LONG, PROMPTS, TIGHT, drain, gather, run, varied_model
from recorders import BrokenRecorder, RerunRecorder, ScriptedCuda, TapeRecorder, paged_decode_in_tensors

from nanoserve import Engine, SamplingParams, attention, engine, replay
from nanoserve.errors import ConfigError, ModelError
from nanoserve.replay import CudaGraphRecorder, buckets, choose_recorder
from nanoserve.staging import Ints, to_device

IN_PLACE = {"attention": "reference"}


@pytest.fixture(scope="module")
def loaded():
    return varied_model()


@pytest.fixture(scope="module")
def expected(loaded):
    return run(Engine(loaded, cache="contiguous"), PROMPTS)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch):
    monkeypatch.setattr(attention, "_kernel", lambda _: paged_decode_in_tensors)


@pytest.fixture
def record_with(monkeypatch):
    """Make an engine with a recorder of a test's."""

    def make(loaded, recorder, **options):
        monkeypatch.setattr(engine, "choose_recorder", lambda *_: recorder)
        return Engine(loaded, **IN_PLACE | options)

    return make


def spoil(of):
    """What nobody has stored becomes NaN, in the spare block as well."""
    pool = of._memory.pool
    unused = torch.ones(pool._buffer.shape[3], dtype=torch.bool)
    for table in of._scheduler.tables:
        unused[table.slots(0, table.num_tokens)] = False
    for block in of._scheduler.prefixes._idle if of._scheduler.prefixes else ():
        unused[block * pool.block_size : (block + 1) * pool.block_size] = False
    with torch.inference_mode():
        pool._buffer[:, :, :, unused] = torch.nan


@pytest.mark.parametrize(
    "options",
    [{"num_blocks": 64}, TIGHT, TIGHT | {"max_step_tokens": 7, "max_running": 5}, {"num_blocks": 100, "block_size": 1},
     {"is_static": True, "max_running": 3, "num_blocks": 64}],
    ids=["roomy", "preempted", "preempted, chunked", "blocks of one", "static"],
)  # fmt: skip
def test_recorded_steps_have_the_tokens_of_eager_ones(loaded, expected, record_with, options):
    recorder = TapeRecorder()
    of = record_with(loaded, recorder, **options)
    assert run(of, PROMPTS, after_step=spoil) == expected
    assert of.notes == ()
    assert 0 < recorder.num_records <= len(buckets(of._scheduler.config.max_running))
    assert recorder.num_replays >= 60


HOW = [{}, {"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.8, "top_k": 9, "seed": 2}]


@pytest.fixture(scope="module")
def asked(loaded):
    """Prompts that begin alike, with parameters of all kinds, and their answers."""
    rng, eager = random.Random(0), Engine(loaded, cache="contiguous")
    found = []
    for place in range(24):
        prompt = PROMPTS[place % 5] + [rng.randrange(256) for _ in range(place % 3)]
        params = SamplingParams(max_new_tokens=rng.randint(1, 24), **HOW[place % 4])
        found.append((prompt, params, run(eager, [prompt], params)[0]))
    return found


def answers(of, asked, rng):
    """What comes of them when they join at any time, in any order."""
    told = {}
    for place in rng.sample(range(len(asked)), len(asked)):
        prompt, params, _ = asked[place]
        of.add_request(prompt, params, request_id=str(place), priority=rng.randint(0, 2))
        for _ in range(rng.randint(0, 2)):
            gather(told, of.step())
    told = drain(of, told, spoil)
    return [told[str(place)] for place in range(len(asked))]


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_join_and_leave_at_any_time_have_the_answers_that_they_have_alone(
    loaded, asked, record_with, seed
):
    rng, recorder = random.Random(seed), TapeRecorder()
    of = record_with(loaded, recorder, num_blocks=9 + seed, block_size=8, max_running=rng.randint(5, 20))
    assert answers(of, asked, rng) == [answer for *_, answer in asked]
    assert recorder.num_replays > 20


def test_rows_are_recorded_in_buckets_up_to_the_most_that_may_run():
    assert buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    assert buckets(21) == [1, 2, 4, 8, 16, 21]


def test_what_is_recorded_ahead_of_time_is_not_recorded_again(loaded, expected, record_with):
    recorder = TapeRecorder()
    of = record_with(loaded, recorder, num_blocks=64, max_running=10)
    assert of.warm_up() == 5 == recorder.num_records
    assert of.counts.num_steps == 0
    assert run(of, PROMPTS, after_step=spoil) == expected
    assert recorder.num_records == 5
    assert of.warm_up() == 5 == recorder.num_records


def test_the_triton_kernel_has_the_same_tokens_over_the_inputs_of_recorded_steps(
    loaded, expected, record_with, monkeypatch
):
    """By Triton's interpreter, which is slow: two requests, a few tokens, a row of padding."""
    kernel = pytest.importorskip("nanoserve.paged_kernel")
    if torch.cuda.is_available():
        pytest.skip("the kernel is compiled for the GPU, and this model is on the CPU")
    monkeypatch.setattr(attention, "_kernel", lambda _: kernel.paged_decode)
    of = record_with(loaded, RerunRecorder(), num_blocks=16, block_size=8, max_running=3)
    of.warm_up()
    answers = run(of, PROMPTS[1:3], SamplingParams(max_new_tokens=5, ignore_eos=True), after_step=spoil)
    assert [ids for ids, _ in answers] == [ids[:5] for ids, _ in expected[1:3]]


def test_only_steps_without_a_prompt_are_replayed(loaded, record_with):
    recorder = TapeRecorder()
    of = record_with(loaded, recorder, num_blocks=64)
    of.add_request(PROMPTS[1], LONG)
    num_replays = []
    for step in range(4):
        if step == 2:
            of.add_request(PROMPTS[2], LONG)
        of.step()
        num_replays.append(recorder.num_replays)
    assert num_replays == [0, 1, 1, 2]


def test_a_step_that_cannot_be_recorded_runs_eagerly_from_then_on_and_is_told_once(loaded, expected, record_with):
    recorder = BrokenRecorder()
    of = record_with(loaded, recorder, num_blocks=64)
    assert run(of, PROMPTS, after_step=spoil) == expected
    assert recorder.num_tries == 1
    assert of.notes == (
        "a step of 8 requests cannot be recorded, steps run eagerly: operation not permitted when stream is capturing",
    )
    assert of.warm_up() == 0


def test_a_logit_that_is_no_number_is_told_of_its_request_alone(loaded, record_with):
    """It comes back with the tokens, and what has been recorded stays what it was."""
    of, told = record_with(loaded, TapeRecorder(), num_blocks=64), {}
    for place in range(2):
        of.add_request(PROMPTS[place], LONG, request_id=str(place))
    gather(told, of.step())
    table = of._scheduler.tables[1]
    with torch.inference_mode():
        of._memory.pool._buffer[:, 1, :, table.slots(0, 1)] = torch.nan
    gather(told, of.step())
    with pytest.raises(ModelError, match="the largest logit is nan"):
        of.step()
    assert len(drain(of, told)["0"][0]) == 64
    assert len(told["1"][0]) == 1


def test_a_block_that_others_read_is_copied_before_a_recorded_step_writes_to_it(loaded, record_with):
    of = record_with(loaded, TapeRecorder(), num_blocks=8, block_size=4, prefix_cache="off")
    (answer,) = run(of, PROMPTS[1:2], SamplingParams(max_new_tokens=4, ignore_eos=True))
    of.add_request(PROMPTS[1], SamplingParams(max_new_tokens=4, ignore_eos=True), request_id="0")
    told = {}
    gather(told, of.step())
    twin = of._scheduler.tables[0].fork()
    stored = of._memory.pool.whole(0)[0][:, twin.slots(0, twin.num_tokens)].clone()
    while of.has_work:
        gather(told, of.step())
    assert told["0"] == answer
    assert of._memory.pool.whole(0)[0][:, twin.slots(0, twin.num_tokens)].equal(stored)


def test_tables_that_did_not_arrive_are_sent_again(loaded, expected, record_with, monkeypatch):
    """A step that fails ends its requests; the next ones find the same blocks, and no table of them on the device."""
    of = record_with(loaded, TapeRecorder(), num_blocks=64)
    of.add_request(PROMPTS[0], LONG)
    of.step()
    send = Ints.send
    monkeypatch.setattr(Ints, "send", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("on its way")))
    assert of.step() == []
    with pytest.raises(torch.OutOfMemoryError):
        of.step()
    monkeypatch.setattr(Ints, "send", send)
    assert run(of, PROMPTS, after_step=spoil) == expected


def test_a_table_goes_to_the_device_when_it_changes(loaded, record_with, monkeypatch):
    """Four numbers of each row in every step, and a table with its row's number: once, and with each new block."""
    of = record_with(loaded, TapeRecorder(), num_blocks=64, block_size=8, max_running=3)
    num_sent, send = [], Ints.send
    monkeypatch.setattr(Ints, "send", lambda self, device: num_sent.append(len(self._ints)) or send(self, device))
    of.add_request(PROMPTS[1], LONG)
    for _ in range(11):
        of.step()
    assert num_sent[1:] == [4 + 2] + [4] * 0 + [4 + 3] + [4] * 7 + [4 + 4]


# The faults that such a thing may have are seen.


def frozen(self, scheduled, size, right=replay.Inputs.fill):
    """The inputs of a size stay what they were when it was recorded."""
    if size not in self.__dict__.setdefault("filled", set()):
        right(self, scheduled, size)
    self.filled.add(size)


def into_block_0(self, scheduled, size, right=replay.Inputs.fill):
    """Padding writes where a request may read."""
    spare, self._pool.spare_block = self._pool.spare_block, 0
    right(self, scheduled, size)
    self._pool.spare_block = spare


def swapped(self, scheduled, size, right=replay.Inputs.fill):
    """A table that is as long as the one before is taken for the same."""
    for held, each in zip(self._held, sorted(scheduled, key=lambda each: not each.samples), strict=False):
        if len(held) == len(each.table.blocks):
            held[:] = each.table.blocks
    right(self, scheduled, size)


def one_too_many(self, scheduled, size, right=replay.Inputs.fill):
    """Each request sees a position that it does not have."""
    right(self, scheduled, size)
    self._contexts += 1


@pytest.mark.parametrize("fault", [frozen, into_block_0, one_too_many, swapped])
def test_a_planted_fault_is_seen(loaded, asked, record_with, monkeypatch, fault):
    monkeypatch.setattr(replay.Inputs, "fill", fault)
    of = record_with(loaded, TapeRecorder(), num_blocks=11, block_size=8)
    with contextlib.suppress(ModelError, IndexError):
        assert answers(of, asked, random.Random(1)) != [answer for *_, answer in asked]


def test_a_number_that_python_took_from_a_step_is_seen(loaded, expected, record_with, monkeypatch):
    """It is frozen in the recording: the reference kernel looks at tables and contexts."""
    from nanoserve.paged_reference import paged_decode_reference

    monkeypatch.setattr(attention, "_kernel", lambda _: paged_decode_reference)
    of = record_with(loaded, TapeRecorder(), num_blocks=64)
    with contextlib.suppress(ModelError):
        assert run(of, PROMPTS) != expected


# What records on a GPU.


def test_a_graph_is_captured_after_a_run_on_the_same_stream_and_replayed_alone():
    cuda = ScriptedCuda()
    recorder = CudaGraphRecorder(CPU, cuda)
    cuda.log.clear()
    result = torch.ones(1)
    again = recorder.record(lambda: cuda.log.append("run") or result)
    assert cuda.log == [
        "device cpu",
        "side waits for main", "stream side", "run", "end stream side", "main waits for side",
        "capture pool on side, thread_local", "run", "end capture pool on side, thread_local",
        "end device cpu",
    ]  # fmt: skip
    cuda.log.clear()
    assert again() is result
    assert cuda.log == ["replay"]


@pytest.mark.parametrize(
    ("graphs", "device", "backend"),
    [("off", "cuda:0", "triton"), ("auto", "cpu", "triton"), ("auto", "cuda:0", "sdpa")],
)
def test_nothing_is_recorded_where_it_is_off_or_cannot_be(graphs, device, backend):
    assert choose_recorder(graphs, SimpleNamespace(device=torch.device(device)), backend) is None


def test_graphs_are_captured_on_a_gpu_with_a_kernel_that_reads_in_place(monkeypatch):
    monkeypatch.setattr(replay, "CudaGraphRecorder", lambda device: f"records on {device}")
    assert choose_recorder("auto", SimpleNamespace(device=torch.device("cuda", 1)), "triton") == "records on cuda:1"


def test_an_engine_without_recordings_has_nothing_to_warm_up(loaded):
    of = Engine(loaded)
    assert (of.warm_up(), of.notes, of._memory.pool._buffer.shape[3]) == (0, (), of._memory.pool.num_blocks * 16)
    with pytest.raises(ConfigError, match="unknown graphs 'on'; choose one of: auto, off"):
        Engine(loaded, graphs="on")
    assert to_device([1, 2], torch.int64, CPU).tolist() == [1, 2]
