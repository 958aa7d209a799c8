"""Peers in turns: who is asked what and when, which numbers are read from the answers, and what is told of failures.

The workers are scripted: each answers at times that its test chose. Nothing is loaded and no clock is read.
"""

import json
import math
from types import SimpleNamespace

import pytest

from benchmarks.harness.errors import InstrumentError, PeerError
from benchmarks.harness.peers import columns, document, host, registry, rounds, summary, table
from benchmarks.harness.peers.columns import COLUMNS, Scene, find_columns, scenes_of
from benchmarks.harness.peers.process import Reply
from benchmarks.harness.peers.rounds import Prompts, Turn, measure
from benchmarks.harness.sources.step_cost import StepCost

SHORT = Scene(name="short", prompt_tokens=3, new_tokens=6)
PREFIX = Scene(name="prefix", prompt_tokens=5, prefix_tokens=3)
MS = 1_000_000


class Scripted:
    """Answers after `ttft_ms`, then every `itl_ms`, and writes down what it was asked into a log shared with others."""

    def __init__(self, name, log, *, ttft_ms=10, itl_ms=2, fails_at=None, dies=False):
        self.name, self.log, self.ttft_ms, self.itl_ms = name, log, ttft_ms, itl_ms
        self.fails_at, self.dies, self.is_alive, self.num_asks = fails_at, dies, True, 0

    def ask(self, prompts, num_new_tokens):
        self.log.append((self.name, prompts, num_new_tokens))
        self.num_asks += 1
        if self.num_asks == self.fails_at:
            self.is_alive = not self.dies
            raise PeerError("planted")
        slower = 100 if num_new_tokens <= rounds.WARM_TOKENS < SHORT.new_tokens else 1  # a warm-up that was timed shows
        stamps = [(self.ttft_ms * slower + i * self.itl_ms) * MS for i in range(num_new_tokens)]
        return Reply(0, [stamps] * len(prompts), [list(range(num_new_tokens))] * len(prompts))


def run(workers, scenes=(SHORT,), num_rounds=3, seed=7):
    return measure(workers, scenes, rounds=num_rounds, prompts=Prompts(1000, seed), seed=seed)


# Turns.


def test_in_each_round_every_peer_has_one_turn_in_an_order_that_the_seed_decides():
    log = []
    turns = run({name: Scripted(name, log) for name in "abc"}, num_rounds=8)
    by_round = [[turn.peer for turn in turns if turn.round == number] for number in range(1, 9)]
    assert all(sorted(peers) == ["a", "b", "c"] for peers in by_round)
    assert len({tuple(peers) for peers in by_round}) > 2
    again = run({name: Scripted(name, []) for name in "abc"}, num_rounds=8)
    assert [turn.peer for turn in again] == [turn.peer for turn in turns]


def test_a_turn_opens_with_a_warm_up_of_the_full_prompt_which_is_in_no_number():
    log = []
    (turn,) = run({"a": Scripted("a", log)}, num_rounds=1)
    assert [(len(prompts[0]), num_new) for _, prompts, num_new in log] == [(3, rounds.WARM_TOKENS), (3, 6)]
    assert [columns.ttft_ms(reply) for reply in turn.replies] == [10]


def test_all_peers_get_the_same_prompts_and_no_prompt_comes_twice():
    log = []
    run({name: Scripted(name, log) for name in "ab"}, scenes=(SHORT, PREFIX), num_rounds=4)
    asked = {name: [prompts[0] for who, prompts, _ in log if who == name] for name in "ab"}
    assert asked["a"] == asked["b"]
    unseen = [ids for ids in asked["a"] if len(ids) == SHORT.prompt_tokens]
    assert len({ids[0] for ids in unseen}) == len(unseen) == 8


def test_only_the_second_ask_of_a_prefix_scene_begins_like_another():
    first, second = Prompts(1000, 0).asks(PREFIX)
    assert first[0][:3] == second[0][:3]
    assert first[0][3] != second[0][3]
    assert len(first[0]) == len(second[0]) == 5


def test_the_requests_of_a_batch_share_nothing():
    (batch,) = Prompts(1000, 0).asks(Scene(name="batch", prompt_tokens=4, num_requests=8))
    assert len({ids[0] for ids in batch}) == 8


def test_the_host_is_looked_at_before_the_first_round_and_after_each():
    seen = []
    workers = {"a": Scripted("a", [])}
    measure(workers, [SHORT], rounds=2, prompts=Prompts(9, 0), seed=0, around=seen.append)
    assert seen == [0, 1, 2]


# Failures.


def test_a_refusal_costs_one_scene_and_its_reason_stands_in_every_round():
    log = []
    other = Scene(name="other", prompt_tokens=2)
    turns = run({"a": Scripted("a", log, fails_at=1), "b": Scripted("b", log)}, scenes=(SHORT, other), num_rounds=2)
    told = {(turn.peer, turn.scene.name, turn.round): turn.failure for turn in turns}
    assert told["a", "short", 1] == told["a", "short", 2] == "planted"
    assert {why for (peer, scene, _), why in told.items() if (peer, scene) != ("a", "short")} == {""}
    assert sum(who == "a" and len(prompts[0]) == 3 for who, prompts, _ in log) == 1  # never asked for it again


def test_who_has_died_is_asked_for_nothing_more_and_the_others_go_on():
    log = []
    other = Scene(name="other", prompt_tokens=2)
    workers = {"a": Scripted("a", log, fails_at=2, dies=True), "b": Scripted("b", log)}
    turns = run(workers, scenes=(SHORT, other), num_rounds=2)
    assert {turn.failure for turn in turns if turn.peer == "a"} == {"planted"}
    assert workers["a"].num_asks == 2
    assert not any(turn.failure for turn in turns if turn.peer == "b")


# Numbers.


def reply(*stamps_ms, ids=None, sent_ms=0):
    stamps = [[at * MS for at in each] for each in stamps_ms]
    return Reply(sent_ms * MS, stamps, ids or [[0] * len(each) for each in stamps])


def test_ttft_and_itl_are_exact():
    one = reply([30, 32, 35, 36], sent_ms=10)
    assert columns.ttft_ms(one) == 20
    assert columns.itl_ms(one) == 2


def test_the_decode_phase_begins_when_every_request_has_its_first_token():
    both = reply([10, 20, 30, 40], [25, 30, 40, 45])
    assert columns.decode_tokens_per_s(both) == pytest.approx(5 / 0.020)
    assert columns.all_tokens_per_s(both) == pytest.approx(8 / 0.045)


def test_the_prefix_columns_read_one_ask_each():
    unseen, found = find_columns(["prefix_unseen", "prefix_found"])
    replies = [reply([50]), reply([7])]
    assert (unseen.read(replies), found.read(replies)) == (50, 7)
    assert scenes_of([unseen, found]) == [unseen.scene]


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(InstrumentError, match="no column 'ttft_7'; choose from: ttft_16, "):
        find_columns(["ttft_7"])
    with pytest.raises(InstrumentError, match="no peer 'lama'; choose from: nanoserve, "):
        registry.find_peers(["lama"])


def test_every_scene_fits_into_what_peers_are_told_to_make_room_for():
    room = [scene.num_requests * (scene.prompt_tokens + scene.new_tokens) for scene in scenes_of(COLUMNS)]
    assert max(room) <= columns.MAX_TOKENS


def peer(name, *, is_ours=False, dtype="bfloat16"):
    return registry.Peer(name=name, what=name, module="m", weights="folder", dtype=dtype, is_ours=is_ours)


PEERS = [peer("ours", is_ours=True), peer("a"), peer("b"), peer("small", dtype="int8")]
TTFT = columns.Column(name="ttft", title="TTFT", unit="ms", scene=SHORT, read=lambda each: columns.ttft_ms(each[0]))


def turns_of(**values):
    """Turns of one scene, with a TTFT for each round; None is a failure."""
    return [
        Turn(number, SHORT, name, *(((), "planted") if ms is None else ([reply([ms, ms + 2])],)))
        for name, each in values.items()
        for number, ms in enumerate(each, 1)
    ]


def test_a_cell_is_the_median_over_rounds_with_its_spread():
    found = summary.cells(turns_of(ours=[4, 10, 5], a=[1, None, 3]), TTFT, ["ours", "a"])
    assert (found["ours"].median, found["ours"].mad, len(found["ours"].by_round)) == (5, 1, 3)
    assert (found["a"].median, found["a"].by_round, found["a"].failure) == (2, {1: 1, 3: 3}, "planted")


def test_the_ratio_is_paired_by_round_and_set_against_the_best_of_the_same_dtype():
    turns = turns_of(ours=[8, 20, 80], a=[4, 8, 100], b=[9, 9, 9], small=[1, 1, 1])
    (found,) = summary.ratios(summary.cells(turns, TTFT, [p.name for p in PEERS]), PEERS, is_more_better=False)
    assert (found.ours, found.best) == ("ours", "a")
    assert found.estimate.value == pytest.approx(2)  # 2, 2.5, 0.8; of the medians it would be 2.5


def test_more_is_better_where_the_column_says_so():
    turns = turns_of(ours=[8], a=[4], b=[9], small=[99])
    (found,) = summary.ratios(summary.cells(turns, TTFT, [p.name for p in PEERS]), PEERS, is_more_better=True)
    assert (found.best, found.estimate.value) == ("b", pytest.approx(8 / 9))


def test_the_ratio_takes_rounds_that_both_have():
    turns = turns_of(ours=[8, None, 30], a=[4, 1, 10], b=[None, None, None], small=[1, 1, 1])
    (found,) = summary.ratios(summary.cells(turns, TTFT, [p.name for p in PEERS]), PEERS, is_more_better=False)
    assert (found.estimate.num_samples, found.estimate.value) == (2, pytest.approx(math.sqrt(6)))


def test_without_another_peer_or_without_ours_there_is_no_ratio():
    alone = summary.cells(turns_of(ours=[1], small=[1]), TTFT, ["ours", "small"])
    assert summary.ratios(alone, [PEERS[0], PEERS[3]], is_more_better=False) == []
    failed = summary.cells(turns_of(ours=[None], a=[1]), TTFT, ["ours", "a"])
    assert summary.ratios(failed, PEERS[:2], is_more_better=False) == []


def test_tokens_agree_up_to_the_first_that_differs():
    def turn(name, number, ids):
        return Turn(number, SHORT, name, [reply([1, 2, 3], ids=[ids])])

    turns = [turn("ours", 1, [5, 6, 7]), turn("a", 1, [5, 9, 7]), turn("ours", 2, [1, 2, 3]), turn("a", 2, [1, 2, 3])]
    turns += [turn("ours", 3, [1, 2, 3]), turn("a", 3, [2, 2, 3])]
    assert summary.agreements(turns, "ours", ["ours", "a"]) == {"a": summary.Agreement(3, 2, 1, 1, 3)}


# The host.


class Cost:
    def read_bytes(self, context):
        return 10.0

    def prefill_flops(self, num_tokens):
        return 2.0 * num_tokens


LONG = Scene(name="prompt 512", prompt_tokens=512, new_tokens=3)


def test_shares_are_of_the_best_ceiling_of_the_run():
    looks = [host.Look(0, 1e4, 1e4, {}), host.Look(1, 2e4, 4e4, {"a": 0.5})]
    turns = [Turn(1, LONG, "a", [reply([100, 101, 102])]), Turn(1, SHORT, "b", [reply([1, 2, 3])])]
    told = {(each.peer, each.what): each.value for each in host.shares(turns, Cost(), looks, ["a", "b"])}
    assert told["a", "MBU at context 512"] == pytest.approx(20 / 0.002 / 2e4)
    assert told["a", "MFU of prompt 512"] == pytest.approx(1024 / 0.1 / 4e4)
    assert ("b", "MFU of prompt 3") not in told


def test_a_process_at_rest_is_told_from_one_that_spins(monkeypatch):
    used = iter([{"still": 1.0, "busy": 2.0, "gone": 3.0}, {"still": 1.0, "busy": 2.5}])
    now = iter([10.0, 10.5])
    monkeypatch.setattr(host, "_used_s", lambda pids: next(used))
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda s: None))
    assert host.cores_at_rest({}) == {"still": 0.0, "busy": 1.0}


# What is told.


def told(turns, *, failures=(), looks=()):
    about = {"model": "m|x", "num_threads": 2, "seed": 0, "cpu": "c", "commit": "0"}
    return document.document(
        about=about, peers=PEERS, said={"ours": {"versions": {"torch": "2"}}}, failures=dict(failures),
        columns=[TTFT], turns=turns, looks=list(looks), cost=Cost(),
    )  # fmt: skip


def test_the_table_holds_medians_spread_and_ratio_and_the_foot_says_why_a_cell_is_empty():
    turns = turns_of(ours=[8, 20, 80], a=[4, 8, 100], b=[None, None, None])
    found = told(turns, failures={"small": "was not built"}, looks=[host.Look(0, 20e9, 1e12, {"a": 0.5})])
    assert table.headings(found) == ["quantity", "better", "ours", "a", "b", "small", "ours / best"]
    assert table.rows(found) == [["TTFT, ms", "lower", "20 ±12", "8 ±4", "failed", "failed", "2.00 x a"]]
    foot = "\n".join(table.foot(found))
    assert "! b failed in everything: planted" in foot
    assert "! small failed in everything: was not built" in foot
    assert "! a took 50 % of a core while it had nothing to do" in foot
    assert "20.0 GB/s; 1000 GFLOP/s" in foot
    assert "ours: ours; weights bfloat16; torch 2" in foot


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([2] * 6, "0.50 [0.50 .. 0.50] x a, ahead"),
        ([8] * 6, "2.00 [2.00 .. 2.00] x a, behind"),
        ([2, 2, 2, 2, 4, 8], "0.50 [0.50 .. 1.56] x a"),
        ([4] * 6, "1.00 [1.00 .. 1.00] x a"),
        ([2] * 5, "0.50 x a"),
    ],
)
def test_who_is_ahead_is_said_where_the_interval_says_so(ours, words):
    (row,) = table.rows(told(turns_of(ours=ours, a=[4] * len(ours))))
    assert row[-1] == words


def test_fewer_rounds_are_told():
    assert "! ttft has fewer rounds of a: 1" in "\n".join(table.foot(told(turns_of(ours=[8, 8], a=[4, None]))))


def test_a_document_is_finite_json_and_its_markdown_is_one_table():
    found = told(turns_of(ours=[8], a=[4]))
    assert json.loads(json.dumps(found, allow_nan=False))["columns"][0]["cells"]["a"]["by_round"] == {"1": 4}
    text = table.as_markdown(found)
    assert "## Peers on m\\|x" in text
    assert sum(line.startswith("|") for line in text.splitlines()) == 3
    assert "8" in table.as_text(found)


def test_a_share_above_one_is_told_and_not_shown():
    looks = [host.Look(0, 1.0, 1.0, {})]
    foot = "\n".join(table.foot(told([Turn(1, LONG, "a", [reply([1, 2, 3])])], looks=looks)))
    assert "MBU at context 512: a above what was measured as the ceiling" in foot


def test_shares_take_what_a_llama_costs():
    shape = SimpleNamespace(
        vocab_size=10, hidden_size=4, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2
    )
    looks = [host.Look(0, 1e9, 1e9, {})]
    (first, _) = host.shares([Turn(1, LONG, "a", [reply([1, 2, 3])])], StepCost(shape, 2), looks, ["a"])
    assert 0 < first.value < 1e-2
