"""Results of many machines put together: the same bytes in any order, and never one machine for another."""

import datetime
import itertools
import json
import shutil

import pytest
from sample_nights import CPU, GPU, START, asv_file, write_night
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness.errors import ArchiveError, InstrumentError
from benchmarks.harness.gate.asv_files import read_pair
from benchmarks.harness.nightly.fleet import exit_code_of, fleet_table, members
from benchmarks.harness.nightly.merging import merge
from benchmarks.harness.nightly.plan import Places
from benchmarks.harness.nightly.runner import Ended
from benchmarks.harness.nightly.site import publish_fleet, show_newest
from benchmarks.harness.nightly.state import State, load_state, save_state

DAY = datetime.timedelta(days=1)


@pytest.fixture
def three(tmp_path):
    """Two machines of one kind and one of another, each with a folder of its own."""
    for number, (name, identity) in enumerate((("cpu-a", CPU), ("cpu-b", CPU), ("gpu", GPU))):
        write_night(tmp_path / name, name, identity=identity, began=START - number * DAY / 24)
    return [tmp_path / name for name in ("cpu-a", "cpu-b", "gpu")]


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def merged(folder, *sources):
    merge(folder, sources)
    return tree(folder)


def test_three_machines_in_any_order_at_once_or_one_by_one_give_the_same_bytes(three, tmp_path):
    whole = merged(tmp_path / "whole", *three)
    assert len(whole) == sum(len(tree(folder)) for folder in three) - 2, "all but the shared list, once"
    for number, order in enumerate(itertools.permutations(three)):
        assert merged(tmp_path / f"at once {number}", *order) == whole
        for source in order:
            found = merged(tmp_path / f"one by one {number}", source)
        assert found == whole
        assert merged(tmp_path / f"at once {number}", *order) == whole, "merging again changes nothing"


def test_the_shared_list_is_that_of_the_newest_night(three, tmp_path):
    assert merged(tmp_path / "whole", *three)["asv/benchmarks.json"] == b"cpu-a"


def test_one_machine_in_two_places_is_united_and_the_newer_state_holds(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for place, began in ((one, START), (two, START + DAY)):
        write_night(place, "m", began=began, head=f"{began.day}" * 40)
    passes = "asv/provenance/m/111111111111-env.jsonl"
    (two / passes).write_text('{"pass": "later", "at": "2026-04-01"}\n')
    whole = merged(tmp_path / "whole", one, two)
    assert whole == merged(tmp_path / "other way round", two, one)
    assert len([name for name in whole if name.endswith("status.json")]) == 2
    assert load_state(tmp_path / "whole", "m").last_measured == "2" * 40
    assert [json.loads(line)["pass"] for line in whole[passes].splitlines()] == ["m", "later"]


def test_of_two_copies_the_one_that_came_further_holds(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write_night(one, "m", finished=False)
    night = write_night(two, "m")
    (two / "asv/m/aaaaaaaa-env.json").write_text(asv_file("a" * 40, started_at=90, value=5.0))
    (one / "asv/m/aaaaaaaa-env.json").write_text(asv_file("a" * 40, started_at=100, value=3.0))
    for order in ((one, two), (two, one)):
        whole = merged(tmp_path / order[0].name / "whole", *order)
        name = f"nights/m/{night.name}/status.json"
        assert json.loads(whole[name])["finished"] is not None
        assert b"3.0" in whole["asv/m/aaaaaaaa-env.json"]


def test_of_two_copies_that_came_as_far_the_order_does_not_choose(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for place in (one, two):
        (write_night(place, "m") / "summary.md").write_text(place.name)
    assert merged(tmp_path / "a", one, two) == merged(tmp_path / "b", two, one)


def test_a_file_that_was_cut_off_never_holds_against_a_whole_one(tmp_path):
    for name, text in (("one", asv_file("a" * 40)[:-9] + "zzz"), ("two", '{"version": 2, "results": {}}')):
        write_night(tmp_path / name, "m")
        (tmp_path / name / "asv/m/aaaaaaaa-env.json").write_text(text)
    for order in itertools.permutations((tmp_path / "one", tmp_path / "two")):
        found = merged(tmp_path / f"whole-{order[0].name}", *order)
        assert found["asv/m/aaaaaaaa-env.json"] == b'{"version": 2, "results": {}}'


class Publishing:
    """asv publish, scripted."""

    def __init__(self, code):
        self.code, self.commands = code, []

    def run(self, command, began):
        self.commands.append(command)
        command.log.write_text("so it went\n")
        return Ended(self.code, 1.0)


def test_the_pages_of_a_fleet_are_asvs_of_all_machines_and_each_ones_newest(three, tmp_path):
    root, runner = tmp_path / "root", Publishing(0)
    root.mkdir()
    (root / "asv.conf.json").write_text('{\n // a comment\n "project": "nanoserve", "results_dir": "elsewhere"}')
    places = Places(root=root, results=tmp_path / "whole", site=tmp_path / "site")
    merge(places.results, three)
    fleet = members(places.results, START, 24.0)
    (root / ".asv").mkdir()
    publish_fleet(places, runner, fleet)
    told = json.loads(places.config.read_text())
    assert told["results_dir"] == str(places.results / "asv")
    assert told["html_dir"] == str(places.site / "asv")
    assert told["project"] == "nanoserve"
    assert sorted(each.name for each in (tmp_path / "site" / "machines").iterdir()) == ["cpu-a", "cpu-b", "gpu"]
    with pytest.raises(InstrumentError, match="asv publish ended with 1: so it went"):
        publish_fleet(places, Publishing(1), fleet)


def test_one_name_for_two_machines_is_refused_with_both_and_nothing_is_written(three, tmp_path):
    write_night(tmp_path / "liar", "gpu", identity=CPU)
    for order in itertools.permutations([*three, tmp_path / "liar"]):
        with pytest.raises(InstrumentError, match="of two machines, or two ways to measure") as refused:
            merge(tmp_path / "whole", order)
        assert str(tmp_path / "gpu") in str(refused.value)
        assert str(tmp_path / "liar") in str(refused.value)
        assert not (tmp_path / "whole").exists()


def test_what_is_no_results_folder_is_refused(three, tmp_path):
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(InstrumentError, match="is no results folder"):
            merge(tmp_path / "whole", [*three, wrong])


def test_a_night_that_lies_with_another_machine_is_refused(three, tmp_path):
    night = next((three[0] / "nights" / "cpu-a").glob("2*"))
    shutil.copytree(night, three[1] / "nights" / "cpu-b" / night.name.replace("T02", "T12"))
    with pytest.raises(ArchiveError, match="'cpu-a', and lies among those of 'cpu-b'"):
        merge(tmp_path / "whole", three)


def test_asv_keeps_kinds_apart_in_a_merged_folder(three, tmp_path):
    """The gate does not judge one machine's commit by another's: each has measured one of the two."""
    (three[2] / "asv/gpu/aaaaaaaa-env.json").unlink()
    (three[2] / "asv/gpu/cccccccc-env.json").write_text(asv_file("c" * 40))
    merge(tmp_path / "whole", three)
    with pytest.raises(ArchiveError, match="results of two machines are never compared"):
        read_pair(tmp_path / "whole" / "asv", "a" * 40, "c" * 40)


# The table.


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [(("same", "better", "same"), 0), (("same", "cannot tell", "same"), 3), (("no data", "worse", "contaminated"), 1),
     (("no data", "cannot tell", "contaminated"), 4), (("same", "contaminated", "cannot tell"), 5)],
)  # fmt: skip
def test_a_fleet_is_as_red_as_its_reddest(tmp_path, verdicts, code):
    for name, verdict in zip("abc", verdicts, strict=True):
        write_night(tmp_path, name, verdict=verdict)
    assert exit_code_of(members(tmp_path, START + DAY, 36)) == code


def test_a_fleet_of_nobody_has_no_data(tmp_path):
    assert exit_code_of(members(tmp_path, START, 36)) == 4


def test_the_table_has_a_row_a_machine_by_kind_and_the_silent_are_no_data(tmp_path):
    write_night(tmp_path, "z", verdict="better")
    write_night(tmp_path, "b", identity=GPU, verdict="worse")
    write_night(tmp_path, "a", began=START - 3 * DAY)
    fleet = members(tmp_path, START + DAY / 24 * 5, 36)
    assert fleet_table(fleet).splitlines()[2:] == [
        "| EPYC, 2 CPUs | a | no data | aaaaaaaaaaaa | 3 d | no data: silent since; it said same: of a |",
        "|  | z | better | aaaaaaaaaaaa | 4 h | better: of z |",
        "| H200 | b | worse | aaaaaaaaaaaa | 4 h | worse: of b |",
    ]
    assert exit_code_of([each for each in fleet if each.machine != "b"]) == 4


def test_the_command_merges_and_tells(three, tmp_path):
    done = CliRunner().invoke(app, ["nightly", "--merge", *map(str, three), "--results", str(tmp_path / "whole")])
    assert done.exit_code == 4, "these nights are long past"
    assert [line.split(" | ")[1] for line in done.output.splitlines()[2:]] == ["cpu-a", "cpu-b", "gpu"]
    assert tree(tmp_path / "whole") == merged(tmp_path / "again", *three)


def test_states_are_not_mixed(tmp_path):
    """A state is one thought: its fields are never of two nights."""
    for place, state in (("one", State(last_good="1", left=("x",), at="2026-01-02")), ("two", State(at="2026-01-01"))):
        write_night(tmp_path / place, "m")
        save_state(tmp_path / place, "m", state)
    merge(tmp_path / "whole", [tmp_path / "two", tmp_path / "one"])
    assert load_state(tmp_path / "whole", "m") == State(last_good="1", left=("x",), at="2026-01-02")


def test_of_two_copies_of_a_night_that_came_equally_far_the_graver_holds(tmp_path):
    """Written by two hands, whatever the reason: no red is lost."""
    one, two = tmp_path / "one", tmp_path / "two"
    write_night(one, "m", verdict="worse")
    write_night(two, "m", verdict="same")
    for number, order in enumerate(((one, two), (two, one))):
        merge(tmp_path / f"all {number}", order)
        (member,) = members(tmp_path / f"all {number}", START, 36.0)
        assert member.verdict == "worse"


def test_other_options_under_one_name_are_refused_as_another_machine_is(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write_night(one, "m")
    write_night(two, "m", began=START + DAY)
    path = two / "nights" / "m" / "machine.json"
    path.write_text(path.read_text().replace('"options": {}', '"options": {"--model": "tiny"}'))
    with pytest.raises(InstrumentError, match="--model was None, is tiny"):
        merge(tmp_path / "all", [one, two])


def test_the_first_page_shows_a_silent_machine_as_one_without_data_and_no_page_of_another_night(tmp_path):
    places = Places(root=tmp_path, results=tmp_path / "results", site=tmp_path / "site")
    older = write_night(places.results, "m")
    (older / "report.html").write_text("older")
    show_newest(places, members(places.results, START, 36.0))
    page = (places.site / "index.html").read_text()
    assert '<b class="same">same</b>' in page
    assert "machines/m/report.html" in page
    write_night(places.results, "m", began=START + DAY)
    show_newest(places, members(places.results, START + 9 * DAY, 36.0))
    page = (places.site / "index.html").read_text()
    assert '<b class="no-data">no data</b>' in page
    assert "report.html" not in page
