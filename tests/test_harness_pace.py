"""How long a session may still take, on a fake clock."""

import pytest

from benchmarks.harness.pace import Pace


class FakeClock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return FakeClock()


def test_nothing_known_is_counted_and_not_guessed(clock):
    pace = Pace(["a", "b"], {}, clock)
    pace.begin("a")
    assert pace.say("warm-up", 1, 5) == "case 1 of 2, warm-up 1 of 5"
    assert pace.say("sample", 1, 6) == "case 1 of 2, sample 1 of 6"
    clock.now_s += 10
    assert pace.say("sample", 2, 6) == "case 1 of 2, sample 2 of 6"


def test_the_last_case_goes_on_at_its_own_pace(clock):
    pace = Pace(["a"], {}, clock)
    pace.begin("a")
    pace.say("sample", 1, 6)
    clock.now_s += 10
    assert pace.say("sample", 2, 6).endswith("about 50 s left")
    clock.now_s += 40
    assert pace.say("sample", 3, 6).endswith("about 2 min left")


def test_cases_to_come_take_what_they_took_the_last_time(clock):
    pace = Pace(["a", "b", "c"], {"a": 20.0, "b": 200.0, "c": 80.0}, clock)
    pace.begin("a")
    assert pace.say("sample", 1, 6).endswith("about 5 min left")
    clock.now_s += 30
    pace.end()
    pace.begin("b")
    assert pace.say("warm-up", 1, 5) == "case 2 of 3, warm-up 1 of 5"
    assert pace.say("sample", 1, 6) == "case 2 of 3, sample 1 of 6, about 5 min left"
    assert pace.taken_s == {"a": 30.0}


def test_a_new_case_is_expected_to_take_what_the_others_took(clock):
    pace = Pace(["a", "b"], {}, clock)
    pace.begin("a")
    clock.now_s += 40
    pace.end()
    pace.begin("b")
    pace.say("sample", 1, 2)
    clock.now_s += 5
    assert pace.say("sample", 2, 2).endswith("about 5 s left")
