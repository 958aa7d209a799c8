"""When requests are due: against theory, against figures worked out by hand, and against every way to spoil a trace."""

import contextlib
import io
import itertools
import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.arrivals import (
    Arrival,
    as_csv,
    asked_rate_per_s,
    bursts,
    from_trace,
    poisson,
    scaled,
    together,
)
from benchmarks.harness.errors import InstrumentError

SIZES = {"prompt_tokens": 16, "new_tokens": 8}
BURSTY = Path(__file__).parents[1] / "benchmarks" / "traces" / "bursty.csv"


def arrival(due_s, prompt_tokens=16, new_tokens=8):
    return Arrival(due_s=due_s, prompt_tokens=prompt_tokens, new_tokens=new_tokens)


def gaps_s(arrivals):
    return [after.due_s - before.due_s for before, after in itertools.pairwise(arrivals)]


def due_s(arrivals):
    return [each.due_s for each in arrivals]


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"due_s": -0.1}, r"due_s must be finite and at least 0, not -0\.1"),
        ({"due_s": math.nan}, "due_s must be finite and at least 0, not nan"),
        ({"due_s": math.inf}, "due_s must be finite and at least 0, not inf"),
        ({"prompt_tokens": 0}, "prompt_tokens must be a whole number of at least 1, not 0"),
        ({"new_tokens": -1}, "new_tokens must be a whole number of at least 1, not -1"),
        ({"new_tokens": 1.5}, r"new_tokens must be a whole number of at least 1, not 1\.5"),
        ({"new_tokens": True}, "new_tokens must be a whole number of at least 1, not True"),
    ],
)
def test_an_arrival_that_cannot_be_is_refused(spoilt, message):
    with pytest.raises(InstrumentError, match=f"^{message}$"):
        Arrival(**{"due_s": 0.0, **SIZES, **spoilt})


def test_together_is_one_moment_and_sizes_may_differ():
    assert together(2, **SIZES) == (arrival(0.0), arrival(0.0))
    assert together(2, prompt_tokens=[16, 32], new_tokens=4) == (arrival(0.0, 16, 4), arrival(0.0, 32, 4))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_one_entry_for_each_request(name):
    with pytest.raises(InstrumentError, match=f"{name} has 2 entries for 3 requests"):
        together(3, **(SIZES | {name: [1, 2]}))
    with pytest.raises(InstrumentError, match=f"{name} has 2 entries for 1 requests"):
        poisson(1.0, 1, seed=0, **(SIZES | {name: [1, 2]}))


PATTERNS = {
    1.0: [0.0, 0.35376462789596075, 0.8663663020434133, 1.150640630735039, 1.5981955625326205],
    0.25: [0.0, 0.30536228218786854, 1.0347269453672712, 1.0509628927818577, 1.050962894319035],
    4.0: [0.0, 0.45862784193384226, 0.854425926809119, 1.2123170410452846, 1.685197398113721],
}


@pytest.mark.parametrize("burstiness", PATTERNS)
def test_a_seed_means_the_same_schedule_for_good(burstiness):
    """What numpy 2.4 draws; if this fails after an update of numpy, older results had other schedules."""
    arrivals = bursts(2.0, 5, burstiness=burstiness, seed=7, **SIZES)
    assert due_s(arrivals) == pytest.approx(PATTERNS[burstiness], rel=1e-12)
    assert (poisson(2.0, 5, seed=7, **SIZES) == arrivals) is (burstiness == 1)


def test_poisson_is_exponential():
    gaps = np.random.Generator(np.random.PCG64(3)).exponential(1 / 5.0, 99)
    assert gaps_s(poisson(5.0, 100, seed=3, **SIZES)) == pytest.approx(gaps.tolist(), rel=1e-9)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(burstiness):
    """A gamma distribution of shape k has the coefficient of variation k ** -0.5."""
    gaps = gaps_s(bursts(20.0, 40_001, burstiness=burstiness, seed=0, **SIZES))
    assert np.mean(gaps) == pytest.approx(1 / 20.0, rel=0.03)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.03)


def test_an_exponential_gap_is_longer_than_the_mean_in_one_of_e():
    gaps = gaps_s(poisson(20.0, 20_001, seed=0, **SIZES))
    assert statistics.mean(gap > 1 / 20.0 for gap in gaps) == pytest.approx(1 / math.e, rel=0.03)


rates = st.floats(1e-3, 1e3)
counts = st.integers(1, 40)
seeds = st.integers(0, 2**64)


@given(rates, counts, counts, st.floats(0.05, 50), seeds)
def test_one_seed_is_one_pattern(rate_per_s, num_requests, num_more, burstiness, seed):
    arrivals = bursts(rate_per_s, num_requests, burstiness=burstiness, seed=seed, **SIZES)
    more = bursts(rate_per_s, num_requests + num_more, burstiness=burstiness, seed=seed, **SIZES)
    twice = bursts(2 * rate_per_s, num_requests, burstiness=burstiness, seed=seed, **SIZES)
    assert len(arrivals) == num_requests
    assert arrivals[0].due_s == 0
    assert due_s(arrivals) == sorted(due_s(arrivals))
    assert more[:num_requests] == arrivals
    assert due_s(twice) == [at_s / 2 for at_s in due_s(arrivals)]


def test_another_seed_is_another_schedule():
    assert len({poisson(1.0, 4, seed=seed, **SIZES) for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"rate_per_s": 0.0}, r"rate_per_s must be positive and finite, not 0\.0"),
        ({"rate_per_s": math.inf}, "rate_per_s must be positive and finite, not inf"),
        ({"rate_per_s": math.nan}, "rate_per_s must be positive and finite, not nan"),
        ({"burstiness": -1.0}, r"burstiness must be positive and finite, not -1\.0"),
        ({"num_requests": 0}, "num_requests must be a whole number of at least 1, not 0"),
        ({"seed": -1}, "a seed is at least 0, not -1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(spoilt, message):
    with pytest.raises(InstrumentError, match=f"^{message}$"):
        bursts(**({"rate_per_s": 1.0, "num_requests": 3, "burstiness": 1.0, "seed": 0} | SIZES | spoilt))
    with pytest.raises(InstrumentError, match="num_requests must be a whole number of at least 1, not 0"):
        together(0, **SIZES)


def test_the_rate_is_that_of_the_gaps():
    assert asked_rate_per_s([arrival(1.0), arrival(1.5), arrival(3.0)]) == 1.0
    assert asked_rate_per_s([]) is asked_rate_per_s([arrival(3.0)]) is asked_rate_per_s(together(9, **SIZES)) is None


def test_scaling_stretches_the_time_axis_and_nothing_else():
    arrivals = (arrival(1.0, 9, 5), arrival(1.5), arrival(3.0))
    assert scaled(arrivals, rate_per_s=2.0) == (arrival(0.5, 9, 5), arrival(0.75), arrival(1.5))


@given(rates, rates, st.integers(2, 40), seeds)
def test_scaling_meets_the_rate(before, after, num_requests, seed):
    arrivals = scaled(poisson(before, num_requests, seed=seed, **SIZES), rate_per_s=after)
    assert asked_rate_per_s(arrivals) == pytest.approx(after)
    assert due_s(arrivals) == sorted(due_s(arrivals))


def test_no_rate_cannot_be_scaled():
    with pytest.raises(InstrumentError, match="3 requests due at the same time have no rate"):
        scaled(together(3, **SIZES), rate_per_s=1.0)
    with pytest.raises(InstrumentError, match=r"rate_per_s must be positive and finite, not 0\.0"):
        scaled((arrival(0.0), arrival(1.0)), rate_per_s=0.0)


@pytest.fixture
def trace(tmp_path):
    def write(content, name="trace"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


OWN = "due_s,prompt_tokens,new_tokens\n"
READ = (arrival(0.5, 12, 3), arrival(2.0, 7, 9))


@pytest.mark.parametrize(
    "content",
    [
        OWN + "0.5,12,3\n2.0,7,9\n",
        "# made up\n\n" + OWN + "0.5,12,3\n  # a pause\n2,7,9\n\n",
        "new_tokens, due_s, model, prompt_tokens\n3, 0.5, a, 12\n9, 2, b, 7\n",
        "\ufeff" + OWN.replace("\n", "\r\n") + "0.5,12,3\r\n2.0,7,9\r\n",
        '"due_s","prompt_tokens","new_tokens"\n"0.5","12","3"\n"2.0","7","9"\n',
        '{"due_s": 0.5, "prompt_tokens": 12, "new_tokens": 3}\n{"new_tokens": 9, "due_s": 2, "prompt_tokens": 7}',
        '# made up\n {"due_s": 5e-1, "prompt_tokens": 12, "new_tokens": 3, "id": null}\n'
        '\n{"due_s": 2.0, "prompt_tokens": 7, "new_tokens": 9}\n',
    ],
    ids=["csv", "comments", "other columns", "spreadsheet", "quotes", "jsonl", "jsonl with more"],
)
def test_traces_of_our_own(trace, content):
    assert from_trace(trace(content)) == READ


@pytest.fixture
def _far_from_utc(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "XST5")
        time.tzset()
        yield
    time.tzset()


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
COUNTED = (arrival(0.0, 12, 3), arrival(0.052, 7, 9), arrival(60.052, 5, 1))


@pytest.mark.parametrize(
    "rows",
    [
        "2023-11-16 23:59:03.9799600,12,3\n2023-11-16 23:59:04.0319600,7,9\n2023-11-17 00:00:04.0319600,5,1",
        "2024-05-10 00:00:03.979960+00:00,12,3\n2024-05-10 00:00:04.031960+00:00,7,9\n"
        "2024-05-10 00:01:04.031960+00:00,5,1\n",
        "2024-05-10 01:59:59.948+02:00,12,3\r\n2024-05-10 00:00:00+00:00,7,9\r\n2024-05-10 00:01:00,5,1\r\n",
    ],
    ids=["2023", "2024", "offsets"],
)
@pytest.mark.usefixtures("_far_from_utc")
def test_traces_as_azure_publishes_them(trace, rows):
    assert from_trace(trace(AZURE + rows)) == COUNTED


def test_traces_as_mooncake_publishes_them(trace):
    rows = [
        {"timestamp": 3000, "input_length": 12, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 6, "output_length": 4, "hash_ids": []},
        {"timestamp": 5999, "input_length": 7, "output_length": 9, "hash_ids": [0]},
    ]
    path = trace("".join(json.dumps(row) + "\n" for row in rows))
    assert from_trace(path) == (arrival(0.0, 12, 3), arrival(0.0, 6, 4), arrival(2.999, 7, 9))


def test_three_requests_of_one_microsecond_are_told_apart(trace):
    rows = "".join(f"2023-11-16 18:17:03.97996{i}0,5,1\n" for i in range(3))
    assert due_s(from_trace(trace(AZURE + rows))) == [0.0, 1e-6, 2e-6]


GOOD = '{"due_s": 1, "prompt_tokens": 2, "new_tokens": 3}\n'
SPOILT = {
    "": "is empty: a trace has at least one request",
    "# nothing\n\n": "is empty: a trace has at least one request",
    OWN: "has a header and no request",
    AZURE.strip(): "has a header and no request",
    "a,b\n1,2\n": "line 1: no trace that is known here: it has a,b, not due_s,prompt_tokens,new_tokens or TIMESTAMP,",
    "0.5,12,3\n2.0,7,9\n": "line 1: no trace that is known here: it has 0.5,12,3, not",
    "# x\n\ndue_s,prompt_tokens\n": "line 3: lacks new_tokens",
    "TIMESTAMP,due\n": "line 1: lacks ContextTokens, GeneratedTokens",
    "due_s,due_s,prompt_tokens,new_tokens\n": "line 1: a column is there twice: due_s,due_s,",
    "timestamp,input_length,output_length\n0,1,1\n": "line 1: no trace that is known here",
    OWN + "1,2,3\n1,2\n": "line 3: has 2 fields and not 3, perhaps cut off: 1,2",
    OWN + "1,2,3,4\n": "line 2: has 4 fields and not 3",
    OWN + "1,2,3\n2,3,4": "line 3: cut off? If it is whole, end it with a newline",
    OWN + '1,"2,3\n': "line 2: no CSV: unexpected end of data",
    OWN + "x,2,3\n": "line 2: due_s is x, which is no number",
    OWN + ",2,3\n": "line 2: due_s is empty, which is no number",
    OWN + "1,two,3\n": "line 2: prompt_tokens is two, which is no whole number",
    OWN + "1,2,3.0\n": "line 2: new_tokens is 3.0, which is no whole number",
    OWN + "1,2,\n": "line 2: new_tokens is empty, which is no whole number",
    OWN + "1,2,0\n": "line 2: new_tokens must be a whole number of at least 1, not 0",
    OWN + "1,-2,3\n": "line 2: prompt_tokens must be a whole number of at least 1, not -2",
    OWN + "-1,2,3\n": "line 2: due_s must be finite and at least 0, not -1.0",
    OWN + "nan,2,3\n": "line 2: due_s must be finite and at least 0, not nan",
    OWN + "1e999,2,3\n": "line 2: due_s must be finite and at least 0, not inf",
    OWN + "1,2,3\n# x\n0.5,2,3\n": "line 4: due before the request above; sort the trace by time",
    AZURE + "2023-11-16 18:17:03.9,2,3\n2023-11-16 18:17:03.8,2,3": "line 3: due before the request above",
    AZURE + "3.5,2,3\n": "line 2: TIMESTAMP is 3.5, which is no ISO time",
    AZURE + "2023-11-16 18:17:03.9,2": "line 2: has 2 fields and not 3",
    GOOD + GOOD[:20]: "line 2: no complete JSON object, perhaps cut off",
    GOOD + "[1, 2, 3]\n": "line 2: no JSON object: [1, 2, 3]",
    GOOD + '{"timestamp": 0, "input_length": 1, "output_length": 1}': "line 2: lacks due_s, prompt_tokens, new_tokens",
    GOOD.replace("1", "0.5") + GOOD.replace("1", "0.25"): "line 2: due before the request above",
    GOOD.replace("1", '"1"'): "line 1: due_s is '1', which is no number",
    GOOD.replace("1", "null"): "line 1: due_s is None, which is no number",
    GOOD.replace("1", "NaN"): "line 1: due_s must be finite and at least 0, not nan",
    GOOD.replace("1", "1" + "0" * 400): "line 1: due_s must be finite and at least 0, not inf",
    GOOD.replace("2", "2.0"): "line 1: prompt_tokens is 2.0, which is no whole number",
    GOOD.replace("2", "true"): "line 1: prompt_tokens is True, which is no whole number",
    GOOD.replace("2", "[" * 100_000): "line 1: no complete JSON object",
    "{}\n": "line 1: no trace that is known here: it has nothing, not due_s,prompt_tokens,new_tokens or timestamp,",
    b"\xff\xfe0": "is no text",
}


@pytest.mark.parametrize(("content", "message"), SPOILT.items(), ids=range(len(SPOILT)))
def test_a_spoilt_trace_is_refused_by_name_and_line(trace, content, message):
    path = trace(content)
    with pytest.raises(InstrumentError) as raised:
        from_trace(path)
    told = str(raised.value)
    assert told.startswith(str(path))
    assert message in told
    assert len(told) < 400 + len(str(path))


def test_a_trace_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InstrumentError, match=r"absent\.csv cannot be read: No such file"):
        from_trace(tmp_path / "absent.csv")
    with pytest.raises(InstrumentError, match="cannot be read: "):
        from_trace(tmp_path)


schedules = st.lists(
    st.builds(arrival, st.floats(0, 1e9), st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=20
).map(lambda arrivals: tuple(sorted(arrivals, key=lambda each: each.due_s)))


@given(schedules)
def test_what_is_written_is_read_to_the_last_digit(tmp_path_factory, arrivals):
    path = tmp_path_factory.getbasetemp() / "round_trip.csv"
    path.write_text(as_csv(arrivals), "utf-8")
    assert from_trace(path) == arrivals


@given(schedules, st.data())
def test_a_trace_cut_off_anywhere_is_no_other_trace(tmp_path_factory, arrivals, data):
    """Cut between two lines it is a shorter trace; within one it is refused."""
    whole = as_csv(arrivals)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    path = tmp_path_factory.getbasetemp() / "cut_off.csv"
    path.write_text(cut, "utf-8")
    if cut.endswith("\n") and cut != OWN:
        assert from_trace(path) == arrivals[: cut.count("\n") - 1]
    else:
        with pytest.raises(InstrumentError):
            from_trace(path)


def test_the_example_trace_is_what_its_own_comment_makes():
    lines = BURSTY.read_text("utf-8").splitlines(keepends=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec("".join(line.removeprefix("#   ") for line in lines if line.startswith("#   ")), {})
    assert out.getvalue() == "".join(line for line in lines if not line.startswith("#"))


def test_the_example_trace_is_small():
    arrivals = from_trace(BURSTY)
    assert len(arrivals) == 24
    assert arrivals[0].due_s == 0
    assert 5 < arrivals[-1].due_s < 6
    assert all(8 <= each.prompt_tokens <= 64 and 8 <= each.new_tokens <= 24 for each in arrivals)
    gaps = gaps_s(arrivals)
    assert statistics.pstdev(gaps) > 1.3 * statistics.mean(gaps)  # burstier than Poisson
