"""Requests through HTTP on a scripted clock, to the last digit; and over real sockets, to the last token."""

import contextlib
import dataclasses
import re

import httpx2
import pytest
from fake_completions import Completions
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_http import HERE, MS, START, ScriptedClock, ScriptedServer, answer, connect, ended, token

from benchmarks.harness.clients import closed_loop
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.errors import InstrumentError, SourceError, UndeclaredMetricError, WrongOutputError
from benchmarks.harness.kept import check_kept
from benchmarks.harness.loop import Enough, Plan
from benchmarks.harness.measure import Measure
from benchmarks.harness.metrics import metric
from benchmarks.harness.over_http import OverHttp, bundles, check_counts, disagreements, server_beside, slow_client
from benchmarks.harness.results import Flag, summarise_pairs, summarise_windows
from benchmarks.harness.serving import Ask, Inbox, measure_window
from benchmarks.harness.sources.client_loop import Arrivals, ClientLog
from benchmarks.harness.sources.elsewhere import ElsewhereSubject
from benchmarks.harness.sources.endpoint import Endpoint, agreed
from benchmarks.harness.sources.server_word import Total, between, look, read_word
from benchmarks.harness.sources.streams import HttpStreams
from benchmarks.harness.timing import Stamp
from benchmarks.harness.traffic import Limits


@contextlib.contextmanager
def scripted(*scripts, **how):
    clock = ScriptedClock()
    server = ScriptedServer(clock, scripts, **how)
    streams = connect(clock, server)
    try:
        yield streams, server, clock
    finally:
        streams.close()


def ask(name, due_ms=0.0, new_tokens=2, after=None):
    return Ask(name, due_ms / 1e3, (5, 6, 7), new_tokens, after)


def play(asks, *scripts, **how):
    with scripted(*scripts, **how) as (streams, server, clock):
        runs = measure_window(streams.serve, asks, clock, clock.nap)
        return runs, server, streams.log


def ms(run):
    """When a run was due, when it was sent, when its tokens came: since the window began."""
    return [(at_ns - START) / MS for at_ns in (run.scheduled_ns, run.sent_ns, *(stamp.at_ns for stamp in run.stamps))]


# To the last digit.


def test_times_ids_and_counts_are_those_of_the_script():
    (a, b), server, log = play(
        [ask("a", new_tokens=3), ask("b", 12.5)], answer(10, 20.5, 31.25, end_ms=40), answer(7, 9, first_id=50)
    )
    assert (ms(a), ms(b)) == ([0, 0, 10, 20.5, 31.25], [12.5, 12.5, 19.5, 21.5])
    assert (a.token_ids, b.token_ids) == ((0, 1, 2), (50, 51))
    assert (a.num_prompt_tokens, a.num_cached, a.num_prefilled, a.finish_reason) == (3, 0, 3, "length")
    assert [each["prompt"] for each in server.asked] == [[5, 6, 7], [5, 6, 7]]
    assert (log.num_arrivals, log.num_together, log.away_ns) == (5, 0, 0)


def test_every_metric_of_a_window_by_hand():
    """Due at 0, 10 and 40 ms; each is 2 ms on its way."""
    asks = [ask("a", 0, 4), ask("b", 10, 2), ask("c", 40, 3)]
    scripts = answer(8, 18, 28, 48), answer(28, 34), answer(3, 4, 5)
    runs, _, _ = play(asks, *scripts, send_ms=2.0)
    assert [ms(run)[1] for run in runs] == [2, 12, 42]
    limits = Limits(ttft_s=0.020, tpot_s=0.012)
    by_hand = {
        "ttft_s": 0.010,  # 10, 30, 5
        "itl_p50_s": 0.008,  # 10, 10, 20, 6, 1, 1
        "itl_p99_s": 0.0195,
        "tpot_s": 0.006,  # 40/3, 6, 1
        "tpot_by_token_s": 0.048 / 6,
        "e2e_s": 0.036,  # 50, 46 - 10, 47 - 40
        "schedule_delay_p50_s": 0.002,
        "schedule_delay_p99_s": 0.002,
        "schedule_delay_max_s": 0.002,
        "asked_requests_per_s": 2 / 0.040,
        "requests_per_s": 3 / 0.050,
        "goodput_requests_per_s": 1 / 0.050,  # a is slow by its TPOT, b by its TTFT
        "mean_tokens_per_s": 9 / 0.050,
    }
    told = {name: summarise_windows(metric(name), "http", [runs], limits).value for name in by_hand}
    assert told == pytest.approx(by_hand, abs=1e-12)


def test_a_closed_loop_sends_the_next_when_the_last_has_ended():
    """Its time counts from the end of the message, which is where a client knows of it."""
    asks = [ask("a"), ask("b", after="a"), ask("c", 5.0, after="b")]
    runs, _, _ = play(asks, answer(4, 6, end_ms=9), answer(2, 3), answer(1, 2))
    assert [ms(run) for run in runs] == [[0, 0, 4, 6], [9, 9, 11, 12], [17, 17, 18, 19]]


def test_a_load_of_clients_names_who_waits_for_whom():
    load = closed_loop(2, 3, prompt_tokens=4, new_tokens=5)
    assert [each.after for each in load] == [None, None, 0, 1, 2, 3]
    with pytest.raises(InstrumentError, match="num_clients must be a whole number of at least 1, not 0"):
        closed_loop(0, 3, prompt_tokens=4, new_tokens=5)


class Nowhere(ElsewhereSubject):
    def __init__(self, endpoint=HERE):
        super().__init__(endpoint, ["m"])


def test_what_was_there_before_the_client_had_time_is_stamped_with_when_it_was_there():
    """Both tokens come at 10 ms, and reading each takes 3 ms: the second is no later for it."""
    for knows, second_ms in ((True, 10), (False, 13)):
        with scripted(answer(10), answer(10, first_id=7), busy_ms=3.0) as (streams, server, clock):
            server.arrivals = streams._arrivals if knows else None
            asks = [ask("a", new_tokens=1), ask("b", new_tokens=1)]
            a, b = measure_window(streams.serve, asks, clock, clock.nap)
        assert [ms(a)[2], ms(b)[2]] == [10, second_ms]


# What the client says of itself.


def test_a_client_that_works_while_tokens_come_says_for_how_long_it_was_away():
    _, _, log = play([ask("a", new_tokens=3)], answer(10, 20, 30), busy_ms=2.5)
    assert (log.away_ns, log.longest_away_ns, log.watched_ns) == (10 * MS, 2.5 * MS, 35 * MS)


def test_while_nobody_is_waited_for_nobody_is_away():
    _, _, log = play([ask("a"), ask("b", 900.0)], answer(10, 20), answer(10, 20))
    assert (log.away_ns, log.watched_ns) == (0, 40 * MS)


def test_tokens_in_one_read_are_counted_and_have_no_time_between_them():
    script = [(10, token(1) + token(2)), (20, token(3)), (20, ended(3))]
    (run,), _, log = play([ask("a", new_tokens=3)], script)
    assert run.itls_s == (0.0, 0.010)
    assert (log.num_arrivals, log.num_together) == (3, 1)


def test_tokens_in_one_event_are_a_bundle_which_has_no_itl():
    (run,), _, _ = play([ask("a", new_tokens=3)], [(10, token(1, 2)), (20, token(3)), (20, ended(3))])
    assert (run.itls_s, run.tpot_s, run.stamps[0]) == (None, 0.005, Stamp(START + 10 * MS, 2))
    undefined = summarise_windows(metric("itl_p50_s"), "http", [[run]])
    with pytest.raises(UndeclaredMetricError, match="itl_p50_s"):
        check_kept(["itl_p50_s"], [undefined])
    with pytest.raises(UndeclaredMetricError, match="itl_p50_s"):
        check_kept(["itl_p50_s"], [undefined], [Flag(kind="bundled", arm="other", what="")])
    check_kept(["itl_p50_s"], [undefined], [Flag(kind="bundled", arm="http", what="")])


def test_gaps_that_the_client_did_not_see_excuse_what_lies_between_tokens_and_nothing_else():
    (run,), _, _ = play([ask("a", new_tokens=3)], [(10, token(1) + token(2) + token(3)), (10, ended(3))])
    assert [*bundles([run])] == [
        "most tokens were found together with the one before: half of the gaps are 0, and no ITL says anything"
    ]
    for name, is_excused in (("itl_price", True), ("tpot_price", True), ("ttft_price", False)):
        undefined = summarise_pairs(metric(name), "http against engine", [])
        with contextlib.nullcontext() if is_excused else pytest.raises(UndeclaredMetricError, match=name):
            check_kept([name], [undefined], [Flag(kind="bundled", arm="http", what="")])


@pytest.mark.parametrize(
    ("log", "late_ms", "said"),
    [
        (ClientLog(watched_ns=100, away_ns=25), 10.0, []),
        (ClientLog(watched_ns=100, away_ns=26, longest_away_ns=7 * MS), 0.0, ["26% of the time", "up to 7 ms"]),
        (ClientLog(num_arrivals=100, num_together=6), 0.0, ["6 of 100 arrivals"]),
        (ClientLog(), 10.5, ["1 of 1 requests were sent more than 10 ms late, by up to 10.5 ms"]),
    ],
)
def test_a_client_is_called_the_bottleneck_above_stated_shares(log, late_ms, said):
    (run,), _, _ = play([ask("a")], answer(10, 20), send_ms=late_ms)
    told = " ".join(slow_client(log, [run]))
    assert all(each in told for each in said)
    assert bool(told) == bool(said)


# What the server says of itself.


WORD = """# TYPE nanoserve_ttft_seconds histogram
nanoserve_ttft_seconds_bucket{{le="+Inf"}} {0}
nanoserve_ttft_seconds_count {0}
nanoserve_ttft_seconds_sum {1}
# TYPE nanoserve_itl_seconds histogram
nanoserve_itl_seconds_count {2}
nanoserve_itl_seconds_sum {3}
# TYPE nanoserve_e2e_seconds histogram
nanoserve_e2e_seconds_count {0}
nanoserve_e2e_seconds_sum {4}
"""


def beside(ttft_s=0.008, e2e_s=0.027, num=1):
    (run,), _, _ = play([ask("a")], answer(10, 30), send_ms=1.0)
    before = read_word(WORD.format(5, 2.0, 100, 3.0, 9.0))
    after = read_word(WORD.format(5 + num, 2.0 + num * ttft_s, 101, 3.0 + 0.019, 9.0 + num * e2e_s))
    return server_beside([between(before, after)], [run])


def test_the_servers_means_stand_beside_the_clients_which_count_from_sending():
    told = beside()
    assert {name: each["client_mean_s"] for name, each in told.items()} == {
        "ttft_s": 0.010, "itl_s": 0.020, "e2e_s": 0.030,
    }  # fmt: skip
    assert [each["server_mean_s"] for each in told.values()] == pytest.approx([0.008, 0.019, 0.027])
    assert {(each["num_client"], each["num_server"]) for each in told.values()} == {(1, 1)}
    check_counts(told, "http")
    assert list(disagreements(told)) == []


def test_a_server_that_counts_otherwise_is_an_error_and_one_that_claims_to_be_slower_a_flag():
    with pytest.raises(WrongOutputError, match="counts 2 of ttft_s where its client saw 1"):
        check_counts(beside(num=2), "http")
    assert list(disagreements(beside(ttft_s=0.011))) == ["ttft_s: the server's mean is 11 ms, above the client's 10 ms"]


def test_totals_of_label_sets_are_added_and_a_mean_of_nothing_is_none():
    assert read_word("")["itl_s"] == Total()
    assert Total().mean_s is None
    labelled = 'nanoserve_itl_seconds_sum{a="1"} 2\nnanoserve_itl_seconds_sum{a="2"} 3\nnanoserve_itl_seconds_count 4\n'
    assert read_word(labelled)["itl_s"] == Total(5.0, 4)


# What goes wrong.


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([(5, token(1))], "broke off after 1 tokens: the stream ended without \\[DONE\\]"),
        ([(5, b'data: {"error": {"message": "no room"}}\n\n')], "the server says: no room"),
        ([(5, token(1)), (6, ended(7))], "the server counts 7 tokens where 1 were seen to arrive"),
    ],
)
def test_a_stream_that_goes_wrong_is_an_error_with_the_url(script, said):
    with pytest.raises(SourceError, match=f"http://scripted/v1/completions: .*{said}"):
        play([ask("a"), ask("b")], script, answer(10, 20))


def test_after_an_error_the_next_window_is_as_good_as_any():
    with scripted([(5, token(1))], answer(10, 20)) as (streams, _, clock):
        with pytest.raises(SourceError):
            measure_window(streams.serve, [ask("a")], clock, clock.nap)
        (run,) = measure_window(streams.serve, [ask("a")], clock, clock.nap)
        assert (run.ttft_s, run.token_ids) == (0.010, (0, 1))


# Over real sockets.


@pytest.fixture(scope="module")
def there():
    with Completions() as server:
        yield server


def real(there):
    return HttpStreams(Endpoint(base_url=there.url, model="m"), Arrivals(DeviceClock()))


@settings(max_examples=10)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5), num=st.integers(1, 6))
def test_all_tokens_arrive_in_their_order_wherever_the_bytes_are_cut(there, cuts, num):
    there.cuts, clock = cuts, DeviceClock()
    streams = real(there)
    asks = [Ask(str(place), 0.001 * place, (place, 1), 3 + place) for place in range(num)]
    runs = measure_window(streams.serve, asks, clock)
    streams.close()
    assert [run.token_ids for run in runs] == [there.ids((place, 1), 3 + place) for place in range(num)]
    assert [run.num_tokens for run in runs] == [3 + place for place in range(num)]
    for run in runs:
        assert run.scheduled_ns <= run.sent_ns <= run.stamps[0].at_ns


def test_connections_are_used_again(there):
    there.cuts, streams = [1000], real(there)
    num_before = there.num_connections
    for _ in range(3):
        assert [each.token_ids for each in streams.stream((4, 4), 2) if each.num_tokens] == [(8,), (9,)]
    streams.close()
    assert there.num_connections == num_before + 1


def test_clients_that_wait_for_their_answers_keep_their_connections(there):
    there.cuts, streams = [0], real(there)
    num_before = there.num_connections
    asks = [ask(str(place), after=str(place - 2) if place > 1 else None) for place in range(8)]
    measure_window(streams.serve, asks, DeviceClock())
    streams.close()
    assert there.num_connections == num_before + 2


def test_a_stream_that_nobody_wants_any_more_is_hung_up(there):
    streams = real(there)
    steps = streams.serve(Inbox([Ask("a", 0.0, (1,), 3)]))
    next(steps)
    steps.close()
    assert not streams._answers
    streams.close()


@pytest.mark.parametrize(
    ("answer", "said"), [((500, "dead"), "500"), ((200, "a b c d"), "ValueError"), ((200, "{"), "ValueError")]
)
def test_a_server_without_a_word_is_told_with_the_url(answer, said):
    status, text = answer
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, text=text))
    client = httpx2.Client(base_url="http://there", transport=transport)
    with client, pytest.raises(SourceError, match=f"http://there/metrics: .*{said}"):
        look(client)


def test_an_answer_that_was_packed_on_its_way_is_told_as_such():
    packed = {"content-type": "text/event-stream", "content-encoding": "gzip"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=packed, stream=httpx2.ByteStream(b"")))
    streams = HttpStreams(HERE, Arrivals(DeviceClock()), transport)
    said = "http://scripted/v1/completions: content encoding 'gzip'"
    with contextlib.closing(streams), pytest.raises(SourceError, match=said):
        list(streams.stream((5, 6, 7), 2))


def test_nobody_there_is_told_with_the_url():
    streams = HttpStreams(Endpoint(base_url="http://127.0.0.1:9/v1", model="m"), Arrivals(DeviceClock()))
    with pytest.raises(SourceError, match=re.escape("http://127.0.0.1:9/v1/completions: ConnectError")):
        list(streams.stream((1,), 1))
    streams.close()


# What an endpoint takes.


@pytest.mark.parametrize(
    ("refused", "left_out", "takes_ids"),
    [
        ((), set(), True),
        (("ignore_eos", "return_token_ids"), {"ignore_eos", "return_token_ids"}, True),
        (("stream_options",), {"stream_options"}, True),
        (("prompt",), set(), False),
        (("prompt", "ignore_eos"), {"ignore_eos"}, False),
    ],
)
@pytest.mark.parametrize("names", [True, False])
def test_what_an_endpoint_refuses_is_left_out_and_nothing_else(there, refused, left_out, takes_ids, names):
    there.refuses, there.names_fields = refused, names
    try:
        with httpx2.Client(base_url=there.url, verify=False) as client:
            found = agreed(Endpoint(base_url=there.url, model="m"), client)
    finally:
        there.refuses = ()
    assert (found.left_out, found.takes_ids) == (left_out, takes_ids)
    assert len(found.notes) == len(left_out) + (not takes_ids)
    body = found.body(Ask("a", 0.0, (1, 2, 300), 4))
    assert isinstance(body["prompt"], list if takes_ids else str)
    assert not left_out & body.keys()


def test_an_endpoint_that_refuses_everything_or_lacks_the_model_says_so(there):
    there.refuses = ("model",)
    try:
        with httpx2.Client(base_url=there.url, verify=False) as client, pytest.raises(SourceError, match="status 400"):
            agreed(Endpoint(base_url=there.url, model="m"), client)
    finally:
        there.refuses = ()
    with pytest.raises(SourceError, match="has no model 'other'; --model is one of: fake-model"):
        ElsewhereSubject.reach(there.url, "other", None)
    with pytest.raises(SourceError, match="no answer"):
        ElsewhereSubject.reach("http://127.0.0.1:9/v1", None, None)


def measured(endpoint, script, **of):
    """One request of 4 + 5 tokens through the whole loop."""
    clock = ScriptedClock()
    server = ScriptedServer(clock, [script] * of.get("num_samples", 1))
    over = OverHttp(
        Nowhere(endpoint), lambda **_: endpoint, clock, has_word=False, connect=lambda at, by: connect(by, server, at)
    )
    plan = Plan(name="t", quantities=("ttft_s", "e2e_s"), arms={"http": {"via": "http"}}, **of)
    measure = Measure(plan, over, clock, turn=lambda arm, n: over.looked_at(arm, {"via": "http"}, n), tell=over.tell)
    with contextlib.closing(over):
        measure.serve(closed_loop(1, 1, prompt_tokens=4, new_tokens=5))
        measure.close()
    return measure


def test_a_measure_reports_these_numbers_and_no_others():
    measure = measured(HERE, answer(10, 30, 40, 50, 60, num_prompt=4), num_samples=3)
    told = {m.metric.name: m.samples for m in measure.measurements}
    assert told == {"ttft_s": (0.010,) * 3, "e2e_s": (0.060,) * 3}
    assert (measure.details["client"]["http"]["num_arrivals"], measure.flags) == (15, [])


def test_a_sample_that_is_broken_off_is_told_by_nobody():
    """The second arm's turn never comes in the third sample: what the first saw in it belongs to no window."""
    arms, clock = {"one": {"via": "http"}, "two": {"via": "http"}}, ScriptedClock()
    server = ScriptedServer(clock, [answer(10, 30, num_prompt=4)] * 6)
    over = OverHttp(Nowhere(), lambda **_: HERE, clock, has_word=False, connect=lambda at, by: connect(by, server, at))
    turns = []

    @contextlib.contextmanager
    def turn(arm, number):
        turns.append(arm)
        if len(turns) > 5:
            raise Enough
        with over.looked_at(arm, arms[arm], number):
            yield

    plan = Plan(name="t", quantities=("ttft_s",), arms=arms, num_samples=3)
    measure = Measure(plan, over, clock, turn=turn, tell=over.tell)
    with contextlib.closing(over):
        measure.serve(closed_loop(1, 1, prompt_tokens=4, new_tokens=2))
        measure.close()
    assert [measure.details["client"][arm]["num_arrivals"] for arm in arms] == [4, 4]


def test_an_early_end_is_told_where_it_cannot_be_prevented_and_an_error_where_it_can():
    early = answer(10, 30, num_prompt=4, reason="stop")
    with pytest.raises(WrongOutputError, match="produced 2 tokens where the workload asks for 5"):
        measured(HERE, early)
    flags = measured(dataclasses.replace(HERE, left_out=frozenset({"ignore_eos"})), early).flags
    assert [(flag.kind, flag.what) for flag in flags] == [
        ("short", "1 of 1 answers ended by themselves: 2 of 5 tokens came")
    ]
