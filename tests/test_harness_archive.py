"""Results files read back as they were written, and every other file refused with a line that names it."""

import dataclasses
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_results import PROVENANCE, as_json, streamed_case, sweep, write

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.archive import newest_file, read_archives, read_results
from benchmarks.harness.errors import ArchiveError
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import Flag, exact_count
from benchmarks.harness.timing import RunTiming, Stamp


def refusal(*paths):
    """The one line that refuses some files."""
    with pytest.raises(ArchiveError) as caught:
        read_archives(paths)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is read back.


def test_results_come_back_as_they_were(tmp_path):
    flags = (Flag(kind="drift", arm="naive", what="rising"), Flag(kind="contaminated", arm="", what="busy"))
    written = [
        streamed_case(8, flags=flags),
        streamed_case(1, num_runs=1),
        streamed_case(3, arms=()),
    ]
    assert read_results([write(tmp_path / "a.json", written)]) == written


def test_a_number_keeps_every_digit(tmp_path):
    [result] = read_results([write(tmp_path / "a.json", [streamed_case(8)])])
    assert result.measurements[0].samples == streamed_case(8).measurements[0].samples


def test_the_gaps_of_every_run_come_back(tmp_path):
    [result] = read_results([write(tmp_path / "a.json", [streamed_case(8)])])
    assert [run.itls_s for run in result.runs["naive"]] == [run.itls_s for run in streamed_case(8).runs["naive"]]


def test_a_file_says_when_and_where(tmp_path):
    [archive] = read_archives([write(tmp_path / "a.json", sweep())])
    assert (archive.label, archive.machine["node"], archive.commit_info["id"]) == ("a", "laptop", "c0ffee")
    assert archive.taken_at.startswith("2026-11-29T17:33")


def test_labels_are_the_shortest_ends_that_differ(tmp_path):
    paths = [write(tmp_path / name, [streamed_case(8)]) for name in ("x/base.json", "y/base.json", "y/head.json")]
    assert [archive.label for archive in read_archives(paths)] == ["x/base", "y/base", "y/head"]
    assert [archive.label for archive in read_archives(paths[1:])] == ["base", "head"]


@given(case=st.text(st.characters(codec="utf-8"), max_size=40), number=st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=50)
def test_any_name_and_any_finite_parameter_survive(tmp_path_factory, case, number):
    result = streamed_case(2, case=case, params={"x": number}, num_runs=1)
    path = write(tmp_path_factory.mktemp("any") / "a.json", [result])
    assert read_results([path]) == [result]


# What is refused.


def test_a_file_that_is_not_there_is_named(tmp_path):
    assert "nowhere.json cannot be read: No such file" in refusal(tmp_path / "nowhere.json")
    assert "cannot be read: Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b'{"machine_info": {"node": "x"', "no complete JSON"),
        (b"\xff\xfe", "no complete JSON"),
        (b"hello", "no complete JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "no results file of pytest-benchmark"),
        (b"3", "no results file of pytest-benchmark"),
        (b'{"a": 1}', "no results file of pytest-benchmark"),
        (b'{"commit_hash": "c", "env_name": "e", "results": {}}', "a results file of asv"),
        (b'{"machine_info": {}, "benchmarks": 3, "datetime": "", "commit_info": {}}', "'benchmarks' is '3'"),
        (b'{"x": NaN}', "holds NaN"),
        (b'{"x": -Infinity}', "holds -Infinity"),
        (b'{"x": 1e999}', "holds 1e999"),
        (b'{"x": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
    ],
)
def test_a_foreign_file_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}: ")
    assert words in refusal(path)


def test_every_truncation_is_refused(tmp_path):
    whole = json.dumps(as_json([streamed_case(2, num_runs=1)])).encode()
    path = tmp_path / "cut.json"
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(path)


def test_without_a_benchmark_there_is_nothing_to_report(tmp_path):
    assert "holds no benchmark" in refusal(write(tmp_path / "a.json", []))


def test_one_good_file_does_not_save_a_bad_one(tmp_path):
    good, bad = write(tmp_path / "good.json", sweep()), write(tmp_path / "bad.json", [])
    assert refusal(good, bad).startswith(str(bad))


DAMAGES = {
    "no extra_info": (lambda entry: entry.pop("extra_info"), "lacks our extra_info"),
    "another fixture's extra_info": (lambda entry: entry.update(extra_info={"a": 1}), "lacks our extra_info"),
    "schema 1": (lambda entry: entry["extra_info"].pop("schema"), "written in schema 1, this reads 2"),
    "schema 3": (lambda entry: entry["extra_info"].update(schema=3), "written in schema 3, this reads 2"),
    "no case": (lambda entry: entry["extra_info"].pop("case"), "lacks 'case'"),
    "case is a number": (lambda entry: entry["extra_info"].update(case=8), "'case' is '8', which is not text"),
    "no version": (lambda entry: entry["extra_info"]["provenance"].pop("instrument_version"), "'instrument_version'"),
    "runs is a list": (lambda entry: entry["extra_info"].update(runs=[]), "not an object"),
    "a measurement is text": (lambda entry: entry["extra_info"]["measurements"].append("x"), "should"),
}
MEASUREMENT_DAMAGES = {
    "an undeclared metric": ({"metric": "coolness"}, "'coolness' is not declared"),
    "the wrong direction": ({"better": "higher"}, "ttft_s has better 'higher', declared is 'lower'"),
    "the wrong unit": ({"unit": "ms"}, "ttft_s has unit 'ms', declared is 's'"),
    "text for a value": ({"value": "fast"}, "'fast' is no number"),
    "true for a value": ({"value": True}, "'True' is no number"),
    "a hole in the samples": ({"samples": [1.0, None]}, "a sample without a value"),
    "true for a count": ({"n": True}, "'n' is 'True', which is not a whole number"),
    "half an observation": ({"n": 1.5}, "'n' is '1.5', which is not a whole number"),
}
RUN_DAMAGES = {
    "a stamp without a count": ({"stamps": [[5]]}, "a stamp is [at_ns, num_tokens], not [5]"),
    "a clock that went back": ({"stamps": [[5, 1], [3, 1]]}, "backwards"),
    "a stamp of nothing": ({"stamps": [[5, 0]]}, "no arrival"),
    "text for a time": ({"admitted_ns": "soon"}, "'admitted_ns' is 'soon'"),
}


def refusal_of(tmp_path, damage):
    whole = as_json(sweep((2, 4)))
    damage(whole["benchmarks"][1])
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(whole))
    text = refusal(path)
    assert text.startswith(f"{path}: benchmark benchmarks/bench_x.py::test_growth[4]: ")
    return text


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_benchmark_is_named(tmp_path, name):
    damage, words = DAMAGES[name]
    assert words in refusal_of(tmp_path, damage)


@pytest.mark.parametrize("name", MEASUREMENT_DAMAGES)
def test_a_damaged_measurement_is_named(tmp_path, name):
    change, words = MEASUREMENT_DAMAGES[name]
    assert words in refusal_of(tmp_path, lambda entry: entry["extra_info"]["measurements"][0].update(change))


@pytest.mark.parametrize("name", RUN_DAMAGES)
def test_a_damaged_run_is_named(tmp_path, name):
    change, words = RUN_DAMAGES[name]
    assert words in refusal_of(tmp_path, lambda entry: entry["extra_info"]["runs"]["naive"][0].update(change))


@pytest.mark.parametrize(("count", "words"), [(1.5, "not a whole number"), (-1, "-1 times"), (None, "'None'")])
def test_an_operator_is_counted_in_whole_numbers(tmp_path, count, words):
    operators = {"operators": {"naive": {"aten.mm.default": count}}}
    assert words in refusal_of(tmp_path, lambda entry: entry["extra_info"].update(details=operators))


def test_one_case_twice_in_a_file_is_refused(tmp_path):
    assert "is there twice" in refusal(write(tmp_path / "a.json", [streamed_case(8), streamed_case(8)]))


def test_one_file_twice_is_refused(tmp_path):
    path = write(tmp_path / "a.json", sweep())
    assert refusal(path, path.parent / "." / "a.json") == f"given twice: {path}"


def of_version(path, version):
    return write(path, [streamed_case(8, provenance=PROVENANCE | {"instrument_version": version})])


def test_two_instrument_versions_are_both_named(tmp_path):
    ours, theirs = of_version(tmp_path / "ours.json", INSTRUMENT_VERSION), of_version(tmp_path / "old.json", "0")
    text = refusal(ours, theirs)
    assert f"{INSTRUMENT_VERSION!r} ({ours}) and '0' ({theirs})" in text


def test_two_instrument_versions_in_one_file_are_both_named(tmp_path):
    results = [streamed_case(8), streamed_case(16, provenance=PROVENANCE | {"instrument_version": "0"})]
    text = refusal(write(tmp_path / "a.json", results))
    assert "a.json" in text
    assert f"{INSTRUMENT_VERSION!r}" in text
    assert "'0'" in text


def test_another_instrument_version_than_ours_is_refused(tmp_path):
    text = refusal(of_version(tmp_path / "old.json", "0"))
    assert f"old.json was measured by instrument version '0', this is {INSTRUMENT_VERSION!r}" in text


# The newest file.


def test_the_newest_results_file_is_found(tmp_path):
    for age, name in enumerate(("new", "old")):
        path = write(tmp_path / "machine" / f"{name}.json", [streamed_case(8)])
        os.utime(path, (1e9 - age, 1e9 - age))
    other = tmp_path / "control.json"
    other.write_text('{"durations": [1, 2]}')
    assert newest_file(tmp_path).name == "new.json"


def test_the_newest_file_is_not_passed_over_because_it_is_empty(tmp_path):
    write(tmp_path / "good.json", [streamed_case(8)])
    (tmp_path / "killed.json").touch()
    os.utime(tmp_path / "good.json", (1e9, 1e9))
    assert newest_file(tmp_path).name == "killed.json"


@pytest.mark.parametrize("folder", [".", "not-there"])
def test_without_a_results_file_the_command_is_told(tmp_path, folder):
    with pytest.raises(ArchiveError, match="pytest --benchmark-only --benchmark-autosave"):
        newest_file(tmp_path / folder)


def test_a_count_keeps_its_last_digit(tmp_path):
    results = [
        dataclasses.replace(streamed_case(8), measurements=(exact_count(metric("flops"), "cached", value),))
        for value in (2**53, 2**53 + 1)
    ]
    values = [
        read_results([write(tmp_path / f"{i}.json", [each])])[0].measurements[0].value for i, each in enumerate(results)
    ]
    assert values == [2**53, 2**53 + 1]


def test_a_run_that_failed_comes_back_failed(tmp_path):
    broken = RunTiming(sent_ns=0, stamps=(Stamp(5, 1),), error="hung up", broke_off_ns=9)
    (read,) = read_results(
        [write(tmp_path / "x.json", [dataclasses.replace(streamed_case(8), runs={"cached": (broken,)})])]
    )
    (run,) = read.runs["cached"]
    assert (run.error, run.broke_off_ns, run.is_finished) == ("hung up", 9, False)


def edited(tmp_path, edit):
    whole = as_json([streamed_case(8)])
    edit(whole["benchmarks"][0]["extra_info"])
    path = tmp_path / "x.json"
    path.write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda told: told["measurements"].append(told["measurements"][0]), "ttft_s of cached is there twice"),
        (lambda told: told["measurements"][0].update(value=-0.5), "holds -0.5"),
        (lambda told: told["measurements"][0]["samples"].append(-1), "holds -1"),
    ],
)
def test_numbers_that_can_not_be_are_refused(tmp_path, edit, said):
    with pytest.raises(ArchiveError, match=said):
        read_results([edited(tmp_path, edit)])


def test_a_loop_of_links_is_named(tmp_path):
    (tmp_path / "a.json").symlink_to(tmp_path / "b.json")
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    with pytest.raises(ArchiveError, match=r"a\.json"):
        read_results([tmp_path / "a.json"])
