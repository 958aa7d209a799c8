"""The proof that the tests of the instrument can fail: each wrong formula swapped in turns them red.

pytest --prove-red
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS

TESTS = Path(__file__).parent

BARE = ("--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-o", "filterwarnings=")

CRASH = r"^E +(TypeError|NameError|ImportError|fixture|AttributeError: (?!'NoneType')).*"
"""A wrong formula gives a wrong value, or None where there was something; anything else is a mistake in the mutant."""

pytestmark = pytest.mark.prove_red


def run_tests(file: str, mutant: str) -> subprocess.CompletedProcess:
    """In a process of its own. None of these tests needs the conftest files, which load the engine."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "mutants", *BARE]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment = inherited | {"PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [*command, "--mutant", mutant, file],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_formula_turns_the_tests_red(name):
    file, _ = MUTANTS[name]
    done = run_tests(file, name)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, f"{name}: {done.stdout[-800:]}{done.stderr[-800:]}"
    crash = re.search(CRASH, done.stdout, re.MULTILINE)
    assert crash is None, f"{name}: red for another reason: {crash[0]}"


@pytest.mark.parametrize("file", sorted({file for file, _ in MUTANTS.values()}))
def test_without_one_the_same_tests_are_green(file):
    done = run_tests(file, "none")
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-3000:] + done.stderr[-1000:]
