"""What `count_work` counts of a prefix cache, and what `python -m benchmarks replay` says of a trace."""

import re

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness.errors import InstrumentError, MissingFeatureError
from benchmarks.harness.loop import Plan
from benchmarks.harness.prefix_traces import as_json_lines, generate_trace
from benchmarks.harness.sources.nanoserve import NanoserveSubject
from benchmarks.harness.work import CountWork


class Clock:
    """A microsecond passes with each look."""

    ns = 0

    def now_ns(self):
        self.ns += 1000
        return self.ns


class Subject:
    """nanoserve's cache without a model; tells how often it was asked."""

    def __init__(self):
        self.asked = []

    def count_hits(self, requests, **options):
        self.asked.append(options)
        return NanoserveSubject.count_hits(None, requests, **options)


def counting(quantity, **arms):
    return CountWork(Plan(name="hits", quantities=(quantity,), arms=arms), Subject(), Clock(), "cpu")


def counts(work):
    return {each.arm: each.value for each in work.measurements}


ARMS = {"lru": {"policy": "lru", "slots": 4}, "lfu": {"policy": "lfu", "slots": 4}}


def test_missed_requests_are_added_up_over_the_seeds():
    found = []
    for seeds in (42, 43):
        work = counting("num_missed_requests", lfu=ARMS["lfu"])
        work.hit_rate(num_requests=200, num_prompts=32, alpha=1.0, seeds=seeds)
        work.close()
        found.append(counts(work)["lfu"])
    assert found[1] - found[0] == 200 - 83  # what seed 42 misses


def test_the_spread_over_seeds_is_told_beside_the_count():
    work = counting("num_missed_requests", **ARMS)
    work.hit_rate(num_requests=20, num_prompts=4, alpha=1.0, seeds=5)
    assert set(work.details["hit_rate"]) == {"lru", "lfu"}
    told = work.details["hit_rate"]["lru"]
    assert told["num_seeds"] == 5
    assert told["mean"] == pytest.approx(1 - counts(work)["lru"] / 100)
    assert 0 <= told["sd"] < 0.2


def test_each_arm_is_counted_once_and_timed_meanwhile():
    work = counting("num_missed_requests", **ARMS)
    work.hit_rate(num_requests=5, num_prompts=4, alpha=1.0, seeds=3)
    assert [each["policy"] for each in work._subject.asked] == ["lru"] * 3 + ["lfu"] * 3
    assert work.primary_durations_s() == [1e-6]
    with pytest.raises(InstrumentError, match="counted already"):
        work.hit_rate(num_requests=5, num_prompts=4, alpha=1.0, seeds=3)


def test_missed_blocks_of_a_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(as_json_lines(generate_trace(50, 1)))
    work = counting(
        "num_missed_blocks", small={"policy": "lru", "capacity": 8}, unlimited={"policy": "lru", "capacity": None}
    )
    work.replay(path)
    work.close()
    blocks = [block for request in generate_trace(50, 1) for block in request.hash_ids]
    assert counts(work)["unlimited"] == len(set(blocks)) < counts(work)["small"] < len(blocks)
    assert work.details["hit_rate"]["unlimited"] == {"mean": pytest.approx(1 - len(set(blocks)) / len(blocks))}


def test_a_trace_with_a_fault_is_no_benchmark(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(as_json_lines(generate_trace(5, 1))[:-20])
    with pytest.raises(InstrumentError, match=r"trace\.jsonl, line 5: no complete JSON object"):
        counting("num_missed_blocks", small={"policy": "lru", "capacity": 8}).replay(path)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(InstrumentError, match=r"arm 'lru' has the options .*; here they are: policy, slots"):
        counting("num_missed_requests", lru={"policy": "lru"}).hit_rate(
            num_requests=1, num_prompts=1, alpha=1.0, seeds=1
        )
    with pytest.raises(InstrumentError, match="seeds is at least 1, not 0"):
        counting("num_missed_requests", **ARMS).hit_rate(num_requests=1, num_prompts=1, alpha=1.0, seeds=0)
    with pytest.raises(MissingFeatureError, match="mru"):
        counting("num_missed_requests", mru={"policy": "mru", "slots": 1}).hit_rate(
            num_requests=1, num_prompts=1, alpha=1.0, seeds=1
        )


# The command.


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(as_json_lines(generate_trace(40, 1)))
    return path


def replay(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_a_table_of_every_policy_at_powers_of_two(trace):
    ran = replay(trace)
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert re.search(r"capacity, blocks . +lru . +lfu . +fifo . +size . +optimum", ran.stdout)
    rows = re.findall(r"^\S +([\d,]+|unlimited) \S +(.*) \S$", ran.stdout, re.MULTILINE)
    num_blocks = len({block for request in generate_trace(40, 1) for block in request.hash_ids})
    sizes = [int(size) for size, _ in rows[:-1]]
    assert sizes == [2**power for power in range(len(sizes))]
    assert sizes[-2] < num_blocks <= sizes[-1]
    assert rows[-1][0] == "unlimited"
    assert rows[-1][1] == rows[-2][1]
    assert f"the first use of each of {num_blocks} blocks is a miss" in ran.stdout


def test_chosen_capacities_and_policies_and_a_picture(trace, tmp_path):
    ran = replay(trace, "--capacity", 9, "--capacity", 5, "--policy", "fifo", "--picture", tmp_path / "new" / "a.svg")
    assert ran.exit_code == 0
    assert re.findall(r"^\S +(\w+) \S +[\d.]+ \S +[\d.]+ \S$", ran.stdout, re.MULTILINE) == ["5", "9", "unlimited"]
    assert "lru" not in ran.stdout
    assert (tmp_path / "new" / "a.svg").read_text().startswith("<?xml")


def test_lines_that_are_left_out_are_told_and_the_rest_is_replayed(trace):
    text = trace.read_text()
    trace.write_text("nonsense\n" * 25 + text)
    ran = replay(trace, "--capacity", 5)
    assert ran.exit_code == 0
    assert "40 requests" in ran.stdout
    assert f"left out: {trace}, line 1: no complete JSON object" in ran.stderr
    assert "left out: 5 lines more\n" in ran.stderr
    assert len(ran.stderr.splitlines()) == 21


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--capacity", 0], "a capacity is a whole number of blocks, at least 1, not 0"),
        (["--policy", "belady"], "belady"),
        (["--picture", "a.gif"], "a picture ends in .png, .svg, .pdf, not as 'a.gif' does"),
        (["--block-tokens", 0], "a block holds at least one token, not 0"),
        (["--block-tokens", 16], "line 1: input_length is"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(trace, arguments, told):
    ran = replay(trace, *arguments)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: ")
    assert told in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_file_that_is_not_there_is_status_2(tmp_path):
    ran = replay(tmp_path / "none.jsonl")
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "none.jsonl cannot be read: No such file or directory" in ran.stderr
