"""How a verdict is told: raw values beside every change, the gravest first, and the same facts in every form."""

import dataclasses
import json
import math
import re

import pytest
from sample_launches import CASE, ITL, key, launches, result, side
from sample_results import BENCHMARK

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.gate.evidence import Evidence, Launch, Side
from benchmarks.harness.gate.sorting import collect
from benchmarks.harness.gate.telling import About, as_dict, as_json, as_markdown, as_text, headline
from benchmarks.harness.gate.verdict import Rules, judge

ABOUT = About(base="main (c0ffee0)", head="HEAD (deadbee)", taken_s=312.4, calibration="2 of 200 false alarms")
RATE, TPOT, OPERATORS = ("cached", "decode_tokens_per_s"), ("cached", "tpot_s"), ("cached", "num_operators")
STEADY = {"launch_sd": 0.004, "pair_sd": 0.01}


def judged(found, **rules):
    return judge(collect(found), Rules(**rules))


def everything():
    """Six launches with something of each kind: the last one is disturbed."""
    ratios = {ITL: 1.0, ("naive", "itl_p50_s"): 1.06, TPOT: 0.9}
    loud = {"disturbed": "others took 40 %"}
    counts = {OPERATORS: (592, 593)}
    found = launches(6, ratios, counts=counts, **STEADY) + launches(1, ratios, counts=counts, told=({}, loud))
    error = "def test():\n>   x\nE   KeyError: 'x'\n\nfoo.py:3: KeyError"
    return judged([_with_others(each, error) for each in found])


def _with_others(launch, error):
    skipped = {(BENCHMARK, "g|pu"): "no GPU"}
    head = (*launch.head.results, result({ITL: [1.0]}, case="64"))
    return Launch(
        base=dataclasses.replace(launch.base, skipped=skipped),
        head=Side(results=head, skipped=skipped, failed={(BENCHMARK, "é,<b>_x_"): error}),
    )


@pytest.fixture(scope="module")
def whole():
    return everything()


def line_of(text, *words):
    (found,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return found


# A sentence.


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ([], "no data: nothing was compared"),
        (launches(3), "cannot tell: 1 of 1 gated quantities neither surely changed nor surely stayed"),
        (launches(8, **STEADY), "same: 1 of 1 gated quantities did not change by anything that matters"),
        (launches(8, counts={OPERATORS: (5, 5)}, **STEADY), "same: 2 of 2 gated quantities did not change by anything"),
        (
            launches(8, {ITL: 0.9}, **STEADY),
            "better: 1 of 1 gated quantities got better, most of all growth[16] cached",
        ),
        (
            launches(8, {ITL: 1.1, ("naive", "itl_p50_s"): 1.3}, counts={OPERATORS: (5, None)}, **STEADY),
            "worse: 2 of 3 gated quantities got worse, most of all growth[16] naive ITL p50 (+",
        ),
        (launches(8, {ITL: 1.1}, counts={OPERATORS: (5, None)}, **STEADY), "); 1 no data"),
        (
            launches(8, counts={OPERATORS: (5, None)}, **STEADY),
            "no data: 1 of 2 gated quantities could not be compared",
        ),
        (launches(2, told=({"disturbed": "x"}, {})), "contaminated: 1 of 1 gated quantities were measured while"),
        (
            [Launch(base=side(), head=side({ITL: [1.0]}))],
            "no data: base has none of what head measured; this is a first",
        ),
        (launches(8, {TPOT: 1.1}), "no data: nothing that gates was measured"),
    ],
)
def test_the_verdict_in_a_sentence(found, sentence):
    judgement = judged(found)
    assert sentence in headline(judgement)
    assert headline(judgement).startswith(judgement.verdict)
    assert as_text(judgement, ABOUT).startswith(headline(judgement))


# Text.


def test_raw_values_stand_beside_the_change_in_a_readable_unit(whole):
    text = as_text(whole, ABOUT)
    row = whole.rows[[row.key for row in whole.rows].index(key("naive", "itl_p50_s"))]
    line = line_of(text, "naive ITL p50", "->")
    assert f"{row.base * 1e3:.3g}" in line
    assert f"{row.head * 1e3:.3g} ms" in line
    assert f"{100 * row.change.value:+.1f} % [{100 * row.change.interval.low:+.1f} .." in line
    assert "6 x 12" in line
    assert re.search(r"worse +growth\[16\] +cached Operators +592 -> 593 +\+0\.2 %", text)


def test_the_gravest_comes_first_and_what_only_reports_last(whole):
    text = as_text(whole, ABOUT)
    verdicts = re.findall(r"^(\(?[a-z ]+?\)?)  .*growth", text, flags=re.M)
    assert verdicts == ["worse", "worse", "no data", "same", "new", "skipped", "(better)"]


def test_reasons_say_what_numbers_do_not(whole):
    text = as_text(whole, ABOUT)
    assert "no data: growth[é,<b>_x_]: head failed in launch 1: KeyError: 'x'" in text
    assert "new: growth[64]: no baseline: base did not measure it" in text
    assert "skipped: growth[g|pu]: no GPU" in text
    assert "disturbed: 1 launches of growth[16], launch 7 by: head: others took 40 %" in text


def test_one_reason_for_many_is_told_once():
    text = as_text(judged(launches(3, {ITL: 1.0, ("naive", "itl_p50_s"): 1.0})), ABOUT)
    assert "cannot tell: growth[16] cached ITL p50, growth[16] naive ITL p50: 3 undisturbed launches; it takes" in text


def test_it_says_where_the_numbers_come_from(whole):
    text = as_text(whole, ABOUT)
    assert "base main (c0ffee0), head HEAD (deadbee)" in text
    assert f"tiny, random, seed 0, float32, A Processor, 2 threads, instrument version {INSTRUMENT_VERSION}" in text
    assert "7 launches, 216 pairs, 312 s" in text
    assert "false alarms at most 1 % over all times and looks up to launch 12; same within 3 %" in text
    assert "2 of 200 false alarms" in text
    once = as_text(judged(launches(5), looks_once=True), dataclasses.replace(ABOUT, notes=("a note",)))
    assert "over all times and one look" in once
    assert "a note" in once


def test_plain_text_has_no_escapes_and_keeps_its_width(whole):
    text = as_text(whole, ABOUT)
    assert "\x1b" not in text
    table = text.split("no data: growth")[0].splitlines()[1:]
    assert max(map(len, table)) <= 118
    assert "\x1b" in as_text(whole, ABOUT, colour=True)
    narrow = as_text(whole, ABOUT, width=70).split("no data: growth")[0].splitlines()[1:]
    assert max(map(len, narrow)) <= 70


# Markdown.


def test_markdown_says_what_changed_and_folds_the_rest(whole):
    text = as_markdown(whole, ABOUT)
    head, details = text.split("<details>")
    assert text.startswith("### Benchmarks: worse: 2 of 4 gated quantities got worse, most of all growth")
    assert "cached ITL p50" not in head
    assert "cached ITL p50" in details
    assert "<summary>All 7 rows</summary>" in details
    assert "- base main (c0ffee0), head HEAD (deadbee)" in details.split("</details>")[1]
    assert "- 2 of 200 false alarms" in details


def test_no_name_breaks_a_table(whole):
    text = as_markdown(whole, ABOUT)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {8}
    assert "<b>" not in text
    assert r"é,&lt;b&gt;\_x\_" in text


def test_of_very_many_rows_the_gravest_are_shown():
    pairs = {key("cached", "itl_p50_s", case=str(n)): () for n in range(300)}
    text = as_markdown(judge(Evidence(num_launches=12, pairs=pairs), Rules()), ABOUT)
    assert "100 more rows are in the JSON." in text
    assert len(text) < 64 * 1024


# JSON.


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_json_is_strict_and_holds_everything(whole):
    told = json.loads(as_json(whole, ABOUT), parse_constant=no_constant)
    assert told == json.loads(json.dumps(as_dict(whole, ABOUT)))
    assert {"schema": 1, "verdict": "worse", "exit_code": 1, "launches": 7, "base": ABOUT.base}.items() <= told.items()
    assert told["rules"]["alpha"] == 0.01
    assert [row["verdict"] for row in told["rows"]] == [row.verdict for row in whole.rows]
    row = next(row for row in told["rows"] if row["metric"] == "itl_p50_s" and row["arm"] == "naive")
    assert {
        "unit": "s",
        "better": "lower",
        "gate": True,
        "exact": False,
        "launches": 6,
        "pairs": 72,
    }.items() <= row.items()
    pairs = whole.evidence.pairs_of(key("naive", "itl_p50_s"))
    assert [each["base"] for each in row["samples"]] == [list(each.base) for each in pairs]
    assert [each["head"] for each in row["samples"]] == [list(each.head) for each in pairs]
    assert len(row["disturbed_samples"]) == 1
    assert row["cost_ratio"]["low"] < row["cost_ratio"]["value"] < row["cost_ratio"]["high"]
    assert told["disturbed"] == [{"benchmark": CASE[0], "case": "16", "launch": 7, "why": "head: others took 40 %"}]
    assert told["provenance"]["base"]["model"] == "tiny"
    failed = next(row for row in told["rows"] if row["case"] == "é,<b>_x_")
    assert failed["why"].endswith("foo.py:3: KeyError")


def test_what_is_not_finite_never_becomes_json(whole):
    with pytest.raises(ValueError, match="JSON"):
        as_json(whole, dataclasses.replace(ABOUT, taken_s=math.nan))


def test_the_same_evidence_is_told_in_the_same_words(whole):
    for tell in (as_text, as_markdown, as_json):
        assert tell(everything(), ABOUT) == tell(whole, ABOUT)


def test_counts_that_are_the_same_are_one_line(whole):
    same = dataclasses.replace(
        next(row for row in whole.rows if row.key.metric == "num_operators"), verdict="same", base=592.0, head=592.0
    )
    text = as_text(dataclasses.replace(whole, rows=(*whole.rows, same, same)), ABOUT)
    assert "same: 2 counts of growth[16]" in text
    assert "592 -> 592" not in text
