"""Traces of shared blocks: what is read, which lines are left out and told, and what was made up."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.prefix_traces import PrefixRequest, as_json_lines, generate_trace, read_trace

COMMITTED = Path(__file__).parents[1] / "benchmarks" / "traces" / "prefixes.jsonl"


def line(**changes):
    record = {"timestamp": 3000, "input_length": 898, "output_length": 57, "hash_ids": [0, 1496], **changes}
    return json.dumps({key: value for key, value in record.items() if value is not ...})


@pytest.fixture
def read(tmp_path):
    def read(text, **how):
        path = tmp_path / "trace.jsonl"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        requests, faults = read_trace(path, **how)
        return requests, [fault.removeprefix(f"{path}, ") for fault in faults]

    return read


def test_a_line_of_a_public_trace(read):
    requests, faults = read(line() + "\n")
    assert requests == (PrefixRequest(timestamp_ms=3000, prompt_tokens=898, new_tokens=57, hash_ids=(0, 1496)),)
    assert faults == []


@pytest.mark.parametrize("text", [line(), "\n" + line() + "\r\n\n", "\ufeff" + line(turn=2, type="text")])
def test_what_says_nothing_is_no_fault(read, text):
    requests, faults = read(text)
    assert (len(requests), faults) == (1, [])


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("nonsense", "no complete JSON object, perhaps cut off"),
        (line()[:-20], "no complete JSON object, perhaps cut off"),
        (b"\xff" + line().encode(), "no complete JSON object, perhaps cut off"),
        ("[" * 100_000, "no complete JSON object, perhaps cut off"),
        ("[1, 2]", "no JSON object: [1, 2]"),
        ("null", "no JSON object: None"),
        (line(timestamp=...), "lacks timestamp"),
        (line(hash_ids=..., output_length=...), "lacks output_length, hash_ids"),
        (line(timestamp="3000"), "timestamp is '3000', which is no number of milliseconds"),
        (line(timestamp=-1), "timestamp is -1"),
        (line(timestamp=math.nan), "timestamp is nan"),
        (line(timestamp=math.inf), "timestamp is inf"),
        (line(timestamp=True), "timestamp is True"),
        (line(input_length=-5), "input_length is -5, which is no whole number of at least 1"),
        (line(input_length=0), "input_length is 0"),
        (line(input_length=898.0), "input_length is 898.0"),
        (line(output_length=-1), "output_length is -1, which is no whole number of at least 0"),
        (line(output_length=None), "output_length is None"),
        (line(hash_ids=[]), "hash_ids is [], which is no list of at least one whole number"),
        (line(hash_ids=7), "hash_ids is 7"),
        (line(hash_ids=["a"]), "hash_ids is ['a']"),
        (line(hash_ids=[1, 2.5]), "hash_ids is [1, 2.5]"),
        (line(hash_ids=[0, 1, 2, 3]), "input_length is 898: 4 hash_ids for 2 blocks of 512 tokens"),
        (line(input_length=1537), "input_length is 1537: 2 hash_ids for 4 blocks of 512 tokens"),
        (line(timestamp=2999), "timestamp is 2999 and that of the line before it 3000"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value[:30],
)  # fmt: skip
def test_a_line_that_is_no_request_is_told_and_the_rest_goes_on(read, bad, told):
    bad = bad if isinstance(bad, bytes) else bad.encode()
    requests, faults = read(b"\n".join([line().encode(), bad, line(timestamp=4000).encode()]) + b"\n")
    assert [each.timestamp_ms for each in requests] == [3000, 4000]
    assert len(faults) == 1
    assert faults[0].startswith(f"line 2: {told}")
    assert len(faults[0]) < 200


def test_a_last_line_that_was_cut_off_is_told(read):
    requests, faults = read(f"{line()}\n{line()[:40]}")
    assert len(requests) == 1
    assert faults[0].startswith("line 2: no complete JSON object, perhaps cut off")


def test_one_wild_time_is_one_fault(read):
    requests, faults = read("\n".join(line(timestamp=at) for at in (0, 10, 10**9, 20, 30)))
    assert [each.timestamp_ms for each in requests] == [0, 10, 10**9, 30]
    assert faults == ["line 4: timestamp is 20 and that of the line before it 1000000000"]


@pytest.mark.parametrize(("num_ids", "is_good"), [(1, True), (2, True), (3, True), (4, False)])
def test_one_id_more_or_less_is_a_matter_of_rounding(read, num_ids, is_good):
    requests, faults = read(f"{line()}\n{line(hash_ids=list(range(num_ids)))}")
    assert (len(requests), len(faults)) == (1 + is_good, 1 - is_good)


def test_blocks_of_another_size(read):
    requests, faults = read(line(input_length=898, hash_ids=list(range(57))), block_tokens=16)
    assert (len(requests), faults) == (1, [])
    with pytest.raises(InstrumentError, match="a block holds at least one token, not 0"):
        read(line(), block_tokens=0)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_trace_is_refused(read, text):
    with pytest.raises(InstrumentError, match=r"trace.jsonl is empty: a trace has at least one request"):
        read(text)


def test_a_trace_without_any_request_is_refused_with_its_first_fault(read):
    with pytest.raises(InstrumentError, match=r"trace.jsonl, line 1: lacks input_length"):
        read(line(input_length=...) + "\nnonsense\n")


@pytest.mark.parametrize("name", ["not there.jsonl", "."])
def test_what_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(InstrumentError, match="cannot be read"):
        read_trace(tmp_path / name)


# Made up.


def test_the_committed_trace_is_what_the_generator_gives():
    assert COMMITTED.read_text() == as_json_lines(generate_trace(200, 0))
    requests, faults = read_trace(COMMITTED)
    assert (list(requests), faults) == (generate_trace(200, 0), ())


def test_equal_ids_stand_behind_equal_ids():
    before = {}
    for request in generate_trace(300, 3):
        for place, block in enumerate(request.hash_ids):
            assert before.setdefault(block, request.hash_ids[:place]) == request.hash_ids[:place]


def test_conversations_grow_and_share_what_they_begin_with():
    requests = generate_trace(300, 5, num_systems=3)
    shared = {request.hash_ids[0] for request in requests if len(request.hash_ids) > 3}
    assert len(shared) < 100
    assert max(len(request.hash_ids) for request in requests) > 10
    assert [each.timestamp_ms for each in requests] == sorted(each.timestamp_ms for each in requests)
    assert all(len(each.hash_ids) == -(-each.prompt_tokens // 512) for each in requests)


def test_seeds_differ():
    assert generate_trace(20, 1) != generate_trace(20, 2)
    assert generate_trace(20, 1) == generate_trace(20, 1)
