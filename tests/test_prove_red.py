"""The proof that the tests of the instrument can fail: each wrong formula swapped in turns them red.

pytest --prove-red
"""

import multiprocessing
import os
import re
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS

TESTS = Path(__file__).parent

BARE = ("--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-o", "filterwarnings=")

CRASH = r"^E +(TypeError|NameError|ImportError|fixture|AttributeError: (?!'NoneType')).*"
"""A wrong formula gives a wrong value, or None where there was something; anything else is a mistake in the mutant."""

pytestmark = pytest.mark.prove_red


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "scipy.stats", "scipy.optimize", "hypothesis"])
"""What all of these tests import: it is imported once, and each of them begins in a copy of the process that did."""


def run_tests(file: str, mutant: str, output: Path) -> int:
    """In a process of its own. None of these tests needs the conftest files, which load the engine."""
    command = ["-q", "-x", "-m", "not slow", "-p", "mutants", *BARE, "--mutant", mutant, file]
    child = FORKS.Process(target=begin, args=(command, output))
    child.start()
    child.join()
    return child.exitcode


def begin(command: list[str], output: Path) -> None:
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    for name in [name for name in os.environ if name.startswith("PYTEST")]:
        del os.environ[name]
    os.chdir(TESTS.parent)
    sys.path.insert(0, str(TESTS))
    sys.exit(pytest.main(command))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_formula_turns_the_tests_red(name, tmp_path):
    file, _ = MUTANTS[name]
    exit_code = run_tests(file, name, tmp_path / "output")
    told = (tmp_path / "output").read_text()
    assert exit_code == pytest.ExitCode.TESTS_FAILED, f"{name}: {told[-1800:]}"
    crash = re.search(CRASH, told, re.MULTILINE)
    assert crash is None, f"{name}: red for another reason: {crash[0]}"


@pytest.mark.parametrize("file", sorted({file for file, _ in MUTANTS.values()}))
def test_without_one_the_same_tests_are_green(file, tmp_path):
    exit_code = run_tests(file, "none", tmp_path / "output")
    assert exit_code == pytest.ExitCode.OK, (tmp_path / "output").read_text()[-4000:]
