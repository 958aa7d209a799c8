"""Profiles: what they choose by markers, and that every name a benchmark uses is one that a profile knows."""

import pytest

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.profiles import PROFILES, profile


@pytest.mark.parametrize(
    ("name", "markers", "wanted"),
    [
        ("default", (), True), ("default", ("desk",), True), ("default", ("desk", "full"), False),
        ("full", ("desk", "full"), True), ("full", (), True),
        ("study", (), False), ("study", ("desk", "full", "study"), True),
    ],
)  # fmt: skip
def test_a_profile_chooses_by_markers(name, markers, wanted):
    assert profile(name).wants(markers) is wanted


def test_an_unknown_profile_names_the_choices():
    with pytest.raises(InstrumentError, match="--profile must be one of default, full, study, not 'fast'"):
        profile("fast")


def test_each_profile_says_what_it_is_for():
    assert all(each.purpose for each in PROFILES.values())
