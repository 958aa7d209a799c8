"""Whose number is it? The source's fingerprint, the commit, the machine, and the proof that the right package ran."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.errors import ForeignPackageError
from benchmarks.harness.provenance import (
    commit_of,
    cpu_model,
    installed_versions,
    prove_installed,
    provenance,
    source_hash,
)


@pytest.fixture
def package(tmp_path):
    return make_package(tmp_path / "checkout" / "engine")


def make_package(folder):
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "sub" / "a.py").write_text("A = 1\n")
    return folder


# The fingerprint of the source.


@pytest.mark.parametrize(
    "change",
    [
        lambda package: (package / "sub" / "a.py").write_text("A = 2\n"),
        lambda package: (package / "sub" / "a.py").rename(package / "sub" / "b.py"),
        lambda package: (package / "sub" / "a.py").rename(package / "a.py"),
        lambda package: (package / "new.py").touch(),
        lambda package: (package / "__init__.py").unlink(),
    ],
    ids=["content", "rename", "move", "addition", "removal"],
)
def test_the_hash_changes_with_the_source(package, change):
    before = source_hash(package)
    change(package)
    assert source_hash(package) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda package: os.utime(package / "sub" / "a.py", (1, 1)),
        lambda package: (package / "__pycache__").mkdir(),
        lambda package: (package / "sub" / "a.cpython-311.pyc").write_bytes(b"\0"),
        lambda package: (package / "sub" / "a.py").chmod(0o600),
    ],
    ids=["mtime", "cache folder", "bytecode", "mode"],
)
def test_the_hash_does_not_change_with_anything_else(package, change):
    before = source_hash(package)
    change(package)
    assert source_hash(package) == before


def test_the_hash_is_the_same_in_another_place(package, tmp_path):
    assert source_hash(shutil.copytree(package, tmp_path / "elsewhere")) == source_hash(package)


# The commit.


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(package, monkeypatch):
    monkeypatch.delenv("ASV_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = package.parent
    (root / ".gitignore").write_text(".venv/\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def test_a_clean_checkout_is_its_commit_and_a_changed_one_says_so(checkout, package):
    head = git(checkout, "rev-parse", "HEAD")
    assert commit_of(package) == head
    (checkout / "README").touch()  # not part of the package
    assert commit_of(package) == head
    (package / "sub" / "a.py").write_text("A = 2\n")
    assert commit_of(package) == f"{head}+dirty"


def test_a_file_that_git_does_not_know_is_a_change(checkout, package):
    (package / "new.py").touch()
    assert commit_of(package).endswith("+dirty")


def test_outside_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("ASV_COMMIT", raising=False)
    assert commit_of(make_package(tmp_path / "engine")) is None


def test_an_environment_inside_a_checkout_does_not_borrow_its_commit(checkout):
    installed = make_package(checkout / ".venv" / "lib" / "site-packages" / "engine")
    assert commit_of(installed) is None


def test_asvs_word_comes_first(checkout, package, monkeypatch):
    monkeypatch.setenv("ASV_COMMIT", "abc")
    assert commit_of(package) == "abc"


# The proof.


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "env" / "lib" / "python3" / "site-packages").mkdir(parents=True)
    return tmp_path / "env"


@pytest.fixture
def site(environment):
    return environment / "lib" / "python3" / "site-packages"


def test_the_installed_package_is_accepted(environment, site, tmp_path):
    package = make_package(site / "engine")
    prove_installed(package, environment)
    (tmp_path / "alias").symlink_to(environment)
    prove_installed(package, tmp_path / "alias")
    prove_installed(tmp_path / "alias" / "lib" / "python3" / "site-packages" / "engine", environment)


def test_a_checkout_is_refused_with_its_place_and_the_remedy(environment, package):
    with pytest.raises(ForeignPackageError, match="nothing was measured") as raised:
        prove_installed(package, environment)
    assert str(package) in str(raised.value)
    assert "PYTHONPATH" in str(raised.value)


@pytest.mark.parametrize("place", ["engine", "src/engine", "lib/engine", "lib/python3/site-packages/../../src/engine"])
def test_a_checkout_inside_the_environment_is_refused(environment, place):
    with pytest.raises(ForeignPackageError):
        prove_installed(make_package(environment / place), environment)


def test_another_environments_package_is_refused(environment, tmp_path):
    package = make_package(tmp_path / "env2" / "lib" / "python3" / "site-packages" / "engine")
    with pytest.raises(ForeignPackageError):
        prove_installed(package, environment)


@pytest.mark.parametrize("inside", [True, False])
def test_a_link_in_site_packages_to_a_checkout_is_refused(environment, site, package, inside):
    target = make_package(environment / "src" / "engine") if inside else package
    (site / "engine").symlink_to(target)
    with pytest.raises(ForeignPackageError):
        prove_installed(site / "engine", environment)


def test_an_environment_below_some_site_packages_gains_nothing_by_it(tmp_path):
    environment = tmp_path / "site-packages" / "env"
    with pytest.raises(ForeignPackageError):
        prove_installed(make_package(environment / "src" / "engine"), environment)


def test_an_installed_dependency_of_this_very_environment_is_accepted():
    prove_installed(Path(pytest.__file__).parent, Path(sys.prefix))


# The rest.


def test_versions_are_those_that_are_installed():
    found = installed_versions()
    assert found["pytest"] == pytest.__version__
    assert {"torch", "numpy", "scipy", "pytest-benchmark"} <= set(found)


def test_packages_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.provenance._PACKAGES", ("pytest", "no-such-package"))
    assert list(installed_versions()) == ["pytest"]


def test_provenance_is_whole_and_strict_json(package):
    told = json.loads(json.dumps(provenance(package, {"model": "m", "device": "cpu"}), allow_nan=False))
    assert told["instrument_version"] == INSTRUMENT_VERSION
    assert (told["package"], told["source_sha256"]) == (str(package), source_hash(package))
    assert (told["model"], told["device"], told["num_cpus"]) == ("m", "cpu", os.cpu_count())
    assert {"commit", "cpu", "python", "versions"} <= set(told)
    assert told["cpu"] == cpu_model() != ""
