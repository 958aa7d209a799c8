"""Each side of a comparison is its own commit, installed on its own: real repositories, real pip, planted faults."""

import dataclasses
import errno
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.errors import BuildError, ForeignPackageError
from benchmarks.harness.gate import builds, revisions
from benchmarks.harness.gate.builds import Build, build, prove_built
from benchmarks.harness.gate.revisions import Revision, resolve
from benchmarks.harness.provenance import source_hash

ROOT = Path(__file__).parents[1]
NOWHERE = "nanoserve-is-not-on-any-index"
PROJECT = f"""
[build-system]
requires = ["setuptools>=77", "{NOWHERE}"]
build-backend = "setuptools.build_meta"

[project]
name = "nanoserve"
version = "0.0.1"
dependencies = ["{NOWHERE}"]

[tool.setuptools]
packages.find.include = ["nanoserve*"]
"""
SLEEPS = """
import os, pathlib, time
if "SIGN" in os.environ:
    pathlib.Path(os.environ["SIGN"]).write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(60)
import setuptools
setuptools.setup()
"""
BUILDS = """
import json, pathlib, signal, sys
from benchmarks.harness.gate.builds import build
from benchmarks.harness.gate.revisions import resolve
signal.signal(signal.SIGINT, signal.default_int_handler)
root, store = map(pathlib.Path, sys.argv[2:])
said = []
built = build(resolve(sys.argv[1], root), root, store, said.append)
print(json.dumps({"said": said, "folder": str(built.folder), "source_sha256": built.source_sha256}))
"""
IDENTITY = {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder, *arguments):
    environment = os.environ | IDENTITY | {"GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(["git", *arguments], cwd=folder, env=environment, text=True, capture_output=True, check=True)
    return done.stdout.strip()


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def commit(folder, files):
    """Write files, commit everything, and return the commit."""
    write(folder, files)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", f"change {len(git(folder, 'tag').split()) + 1}")
    return git(folder, "rev-parse", "HEAD")


def make_repository(folder):
    """Three commits: no package; an engine whose attributes try to keep files out; a slower engine on main."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    commit(folder, {"README.md": "Nothing yet.\n", ".gitignore": "ignored/\n"})
    git(folder, "tag", "empty")
    attributes = "nanoserve/kept.py export-ignore\nnanoserve/__init__.py export-subst\n"
    engine = {"nanoserve/__init__.py": 'SPEED = 1  # "$Format:%H$"\n', "nanoserve/kept.py": "KEPT = True\n"}
    commit(folder, {"pyproject.toml": PROJECT, ".gitattributes": attributes, "setup.py": SLEEPS} | engine)
    git(folder, "tag", "-a", "fast", "-m", "an annotated tag")
    commit(folder, {"nanoserve/__init__.py": "SPEED = 2\n"})
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A repository that tests only read."""
    return make_repository(tmp_path_factory.mktemp("shared") / "repository")


@pytest.fixture
def repository(shared, tmp_path):
    return shutil.copytree(shared, tmp_path / "repository", symlinks=True)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def copies(monkeypatch):
    """pip's place taken by a copy: for tests of the store, which need no pip. Counts the calls."""
    calls = []

    def copy(source, installed):
        calls.append(source)
        shutil.copytree(source / "nanoserve", installed / "nanoserve", symlinks=True)
        return 0, ""

    monkeypatch.setattr(builds, "_pip_install", copy)
    return calls


def built(name, root, store, say=lambda text: None):
    return build(resolve(name, root), root, store, say)


def contents(folder):
    """All files below a folder, with their bytes and times."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def visible(store):
    return sorted(path.name for path in store.glob("[!.]*"))


# Which commit a name is.


def test_every_way_to_name_a_commit_gives_the_commit(shared):
    fast = git(shared, "rev-parse", "HEAD~1")
    for name in ("fast", "HEAD~1", "main^", "refs/tags/fast", "tags/fast", "@~", "HEAD^{/change 2}", fast, fast[:9]):
        assert resolve(name, shared) == Revision(name=name, commit=fast)


def test_a_revision_reads_as_its_name_and_its_commit(shared):
    head = git(shared, "rev-parse", "HEAD")
    assert str(resolve("main", shared)) == f"main ({head[:12]})"
    assert str(resolve(head, shared)) == str(resolve(head[:8], shared)) == head[:12]
    assert str(Revision(name="HEAD+dirty", commit=f"{head}+dirty")) == f"HEAD+dirty ({head[:12]}+dirty)"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("-x", "no revision"),
        ("--all", "no revision"),
        ("", "no revision"),
        ("+dirty", "unknown revision ''"),
        ("mian", "unknown revision 'mian'.*no branch, tag or commit.*latest branches here: main.*git fetch"),
        ("mian+dirty", "unknown revision 'mian'"),
        ("0" * 40, "unknown revision '0000"),
        ("^HEAD", "unknown revision"),
        ("HEAD~1..HEAD", "unknown revision"),
        ("HEAD:nanoserve", "unknown revision.*git says:.*tree"),
        ("fast+dirty", "only the working tree can be dirty.*HEAD"),
    ],
)
def test_what_is_no_commit_is_refused_with_what_was_looked_for(shared, name, says):
    with pytest.raises(BuildError, match=rf"(?s){says}"):
        resolve(name, shared)


def test_a_name_of_a_branch_and_a_tag_is_not_guessed(repository):
    git(repository, "branch", "fast", "main")
    git(repository, "config", "core.warnAmbiguousRefs", "false")
    with pytest.raises(BuildError, match=r"names a branch and a tag.*refs/heads"):
        resolve("fast", repository)
    assert resolve("refs/heads/fast", repository).commit == git(repository, "rev-parse", "HEAD")


def test_a_shallow_clone_says_that_it_is_one(shared, tmp_path):
    git(tmp_path, "clone", "-q", "--depth", "1", shared.as_uri(), "shallow")
    assert resolve("HEAD", tmp_path / "shallow").commit == git(shared, "rev-parse", "HEAD")
    for name in ("HEAD~1", git(shared, "rev-parse", "fast^{commit}")):
        with pytest.raises(BuildError, match="git fetch --unshallow"):
            resolve(name, tmp_path / "shallow")


def test_a_folder_that_is_no_checkout_is_refused(shared, tmp_path):
    with pytest.raises(BuildError, match=r"(?s)no git checkout.*git clone.*git says:.*not a git repository"):
        resolve("HEAD", tmp_path)
    with pytest.raises(BuildError, match="lies inside that of"):
        resolve("HEAD", shared / "nanoserve")


def test_without_git_the_error_says_so(shared, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BuildError, match=r"git cannot run.*git"):
        resolve("HEAD", shared)


def test_inside_a_hook_of_another_repository_the_checkout_is_still_the_one_asked_for(shared, tmp_path, monkeypatch):
    git(tmp_path, "init", "-q", "other")
    for name in ("GIT_DIR", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "other" / ".git"))
    assert len(resolve("HEAD+dirty", shared).commit) == 40


def test_settings_of_the_repository_keep_no_file_out_and_nothing_in_it_changes(repository, tmp_path):
    wanted = git(repository, "ls-tree", "-r", "--name-only", "fast").split()
    for name in ("core.sparseCheckout", "core.splitIndex"):
        git(repository, "config", name, "true")
    hook = repository / ".git" / "hooks" / "post-index-change"
    write(repository, {".git/info/sparse-checkout": "/README.md\n"})
    hook.write_text(f"#!/bin/sh\ntouch '{repository / 'it-ran'}'\n")
    hook.chmod(0o755)
    os.utime(repository / "README.md", (1, 1))  # git status would like to note that the content is the same
    before = contents(repository)
    resolve("HEAD+dirty", repository)
    revisions.export(resolve("fast", repository), repository, tmp_path / "export")
    assert contents(repository) == before
    found = [path.relative_to(tmp_path / "export") for path in (tmp_path / "export").rglob("*") if path.is_file()]
    assert sorted(map(str, found)) == sorted(wanted)


# The working tree.


def test_a_working_tree_without_changes_is_head(repository):
    write(repository, {"ignored/a.py": "", "nanoserve/__pycache__/x.pyc": ""})
    (repository / ".git" / "info" / "exclude").write_text("__pycache__\n")
    head = git(repository, "rev-parse", "HEAD")
    assert resolve("HEAD+dirty", repository) == Revision(name="HEAD+dirty", commit=head)


@pytest.mark.parametrize("name", ["HEAD+dirty", "main+dirty", "@+dirty"])
@pytest.mark.parametrize("change", ["nanoserve/__init__.py", "nanoserve/new.py"])
def test_a_changed_or_an_untracked_file_makes_it_dirty(repository, name, change):
    head = git(repository, "rev-parse", "HEAD")
    write(repository, {change: "SPEED = 3\n"})
    assert resolve(name, repository) == Revision(name=name, commit=f"{head}+dirty")
    assert resolve("HEAD", repository).commit == head


def test_the_working_tree_is_taken_as_it_is(repository, tmp_path):
    (repository / "nanoserve" / "kept.py").unlink()
    write(repository, {"ignored/a.py": "", "nanoserve/new é.py": "", "nanoserve/__init__.py": "SPEED = 3\n"})
    write(tmp_path, {"elsewhere/outside.py": ""})
    (repository / "link").symlink_to(tmp_path / "elsewhere")
    git(repository, "init", "-q", "nested")
    revisions.export(resolve("HEAD+dirty", repository), repository, tmp_path / "export")
    found = {path.relative_to(tmp_path / "export").as_posix() for path in (tmp_path / "export").rglob("*")}
    tracked = {".gitignore", ".gitattributes", "README.md", "pyproject.toml", "setup.py"}
    assert found == tracked | {"nanoserve", "nanoserve/__init__.py", "nanoserve/new é.py", "link"}
    assert (tmp_path / "export" / "link").is_symlink()
    assert (tmp_path / "export" / "nanoserve" / "__init__.py").read_text() == "SPEED = 3\n"


def test_a_folder_replaced_by_a_link_is_not_copied_through(repository, tmp_path):
    shutil.move(repository / "nanoserve", tmp_path / "elsewhere")
    (repository / "nanoserve").symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    revisions.export(resolve("HEAD+dirty", repository), repository, tmp_path / "export")
    assert (tmp_path / "export" / "nanoserve").is_symlink()
    assert contents(tmp_path / "elsewhere") == before


def test_changes_on_top_of_another_commit_than_the_one_resolved_are_refused(repository, store, copies):
    write(repository, {"nanoserve/new.py": ""})
    revision = resolve("HEAD+dirty", repository)
    commit(repository, {})
    with pytest.raises(BuildError, match="only the working tree can be dirty"):
        build(revision, repository, store)


def test_one_build_of_the_working_tree_is_kept_and_is_known_by_its_contents(repository, store, copies):
    clean = built("HEAD", repository, store)
    write(repository, {"nanoserve/new.py": "A = 1\n"})
    first = built("HEAD+dirty", repository, store)
    assert built("main+dirty", repository, store).folder == first.folder
    assert len(copies) == 2
    write(repository, {"nanoserve/new.py": "A = 2\n"})
    second = built("HEAD+dirty", repository, store)
    assert second.source_sha256 != first.source_sha256
    assert visible(store) == sorted([clean.folder.name, second.folder.name])
    assert second.folder.name.startswith("dirty-")
    assert (second.folder / "nanoserve" / "new.py").read_text() == "A = 2\n"


def test_a_store_inside_the_checkout_does_not_make_it_dirty(repository, copies, monkeypatch):
    monkeypatch.chdir(repository)
    found = built("HEAD", repository, Path("builds"))
    assert found.folder == repository / "builds" / found.revision.commit, "a worker may run elsewhere"
    assert not resolve("HEAD+dirty", repository).is_dirty


# From a commit to an installed package, with pip.


@pytest.fixture(scope="module")
def fast(shared, tmp_path_factory):
    """The commit `fast`, built by pip where settings, names and the checkout work against it."""
    hostile = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_USER": "1",
        "PIP_REQUIRE_HASHES": "1",
        "PIP_TARGET": "/nonexistent",
        "PIP_CONFIG_FILE": str(tmp_path_factory.mktemp("pip") / "pip.conf"),
        "PYTHONPATH": ".",
    }
    Path(hostile["PIP_CONFIG_FILE"]).write_text("[install]\neditable = /nonexistent\n")
    store = tmp_path_factory.mktemp("a store; [x]")
    before = contents(shared / ".git")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shared)
        for name, value in hostile.items():
            patch.setenv(name, value)
        found = built("fast", shared, store)
    assert contents(shared / ".git") == before, "nothing is registered in .git"
    assert visible(store) == [found.folder.name]
    return found


def test_a_build_holds_the_commits_own_source_and_nothing_of_the_checkout(fast, shared):
    assert fast.folder.name == fast.revision.commit == git(shared, "rev-parse", "fast^{commit}")
    assert (fast.folder / "nanoserve" / "__init__.py").read_text() == 'SPEED = 1  # "$Format:%H$"\n'
    assert (fast.folder / "nanoserve" / "kept.py").exists(), "export-ignore is for archives"
    assert fast.source_sha256 == source_hash(fast.folder / "nanoserve")
    assert (shared / "nanoserve" / "__init__.py").read_text() == "SPEED = 2\n"
    assert not (shared / "build").exists()


def test_a_worker_that_has_it_first_on_its_path_imports_it(fast, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(fast.folder)!r}); import nanoserve, importlib.metadata; "
        f"print(nanoserve.SPEED, nanoserve.__file__, importlib.metadata.version('nanoserve'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=True)
    assert done.stdout.strip() == f"1 {fast.folder / 'nanoserve' / '__init__.py'} 0.0.1"


def test_a_build_that_is_there_is_used_again(fast, shared, copies):
    assert built("fast", shared, fast.folder.parent) == fast
    (fast.folder / "nanoserve" / "__pycache__").mkdir(exist_ok=True)
    (fast.folder / "nanoserve" / "__pycache__" / "other.pyc").touch()
    named = built(fast.revision.commit, shared, fast.folder.parent)
    assert dataclasses.replace(named, revision=fast.revision) == fast
    assert copies == []


def test_a_build_is_used_again_where_the_disk_is_full_and_tools_are_gone(fast, shared, copies, monkeypatch):
    monkeypatch.setattr(builds, "_check_disk", pytest.fail)
    monkeypatch.setattr(builds, "_check_tools", pytest.fail)
    assert built("fast", shared, fast.folder.parent) == fast


def edit(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    "spoil",
    [
        edit("nanoserve/kept.py", "KEPT = False\n"),
        edit("nanoserve/more.py", ""),
        edit("nanoserve/data.json", "{}"),
        edit("sitecustomize.py", ""),
        edit("build.json", "{"),
        edit("build.json", "[]"),
        lambda folder: (folder / "build.json").unlink(),
        lambda folder: (folder / "nanoserve" / "kept.py").unlink(),
        lambda folder: shutil.rmtree(folder / "nanoserve"),
        lambda folder: [shutil.rmtree(folder), folder.touch()],
        lambda folder: [shutil.rmtree(folder), folder.symlink_to("/nonexistent")],
    ],
)
def test_a_build_that_has_changed_is_built_anew(shared, store, copies, spoil):
    first, said = built("fast", shared, store), []
    spoil(first.folder)
    assert built("fast", shared, store, said.append) == first
    assert len(copies) == 2
    assert "builds it in" in said[0]
    assert source_hash(first.folder / "nanoserve") == first.source_sha256
    assert visible(store) == [first.folder.name]
    assert {path.name for path in first.folder.iterdir()} == {"nanoserve", "build.json"}


def test_a_build_under_the_name_of_another_commit_or_by_another_python_is_not_used(shared, store, copies, monkeypatch):
    first = built("fast", shared, store)
    shutil.copytree(first.folder, store / git(shared, "rev-parse", "main"))
    assert built("main", shared, store).source_sha256 != first.source_sha256
    assert len(copies) == 2
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-27")
    built("fast", shared, store)
    assert len(copies) == 3


# What cannot be built says why, and leaves nothing.


def refuses(says, name, root, store):
    before = visible(store)
    with pytest.raises(BuildError, match=rf"(?s){says}") as caught:
        built(name, root, store)
    assert visible(store) == before
    return str(caught.value)


def test_a_commit_without_nanoserve_is_refused_before_pip_runs(shared, store, copies):
    assert refuses("has no nanoserve/__init__.py", "empty", shared, store).startswith("empty (")
    assert copies == []


def test_a_commit_that_does_not_build_is_shown_with_what_pip_said(repository, store):
    head = commit(repository, {"setup.py": "raise SystemExit('the planted fault')\n"})
    text = refuses("the planted fault", "HEAD", repository, store)
    assert text.startswith(f"HEAD ({head[:12]}) cannot be built, pip ended with 1:")
    assert len(text.splitlines()) <= 16


def test_what_pip_leaves_out_or_adds_is_named(repository, store):
    listed = PROJECT.replace('packages.find.include = ["nanoserve*"]', 'packages = ["nanoserve"]')
    files = {"nanoserve/cache/blocks.py": "", "nanoserve/attention.py": "", "build/lib/nanoserve/old.py": ""}
    commit(repository, {"pyproject.toml": listed} | files)
    named = r"nanoserve/cache/blocks\.py \(left out\), nanoserve/old\.py \(added\)"
    refuses(rf"is not what the commit holds: {named}\. ", "HEAD", repository, store)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (edit("kept.py", "KEPT = 0"), r"nanoserve/kept\.py \(changed\)"),
        (edit("kept2.py", ""), r"nanoserve/kept2\.py \(added\)"),
        (shutil.rmtree, r"nanoserve/__init__\.py \(left out\), nanoserve/kept\.py \(left out\)"),
    ],
)
def test_an_installed_package_with_another_source_is_refused(shared, store, monkeypatch, plant, says):
    def install(source, installed):
        shutil.copytree(source / "nanoserve", installed / "nanoserve")
        plant(installed / "nanoserve")
        return 0, ""

    monkeypatch.setattr(builds, "_pip_install", install)
    refuses(says, "fast", shared, store)


@pytest.mark.parametrize("version", ["76.1.0", None])
def test_without_a_recent_setuptools_the_command_is_named(shared, store, copies, monkeypatch, version):
    def found(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    refuses(r'setuptools.*pip install "setuptools>=77"', "fast", shared, store)
    assert copies == []


def test_without_pip_the_command_is_named(shared, store, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("has no pip.*python -m ensurepip", "fast", shared, store)


@pytest.mark.parametrize("name", ["fast", "HEAD+dirty"])
def test_a_full_disk_is_seen_before_anything_is_written(repository, store, copies, monkeypatch, name):
    write(repository, {"nanoserve/new.py": ""})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 10**12, 199_000_000))
    monkeypatch.setattr(builds, "export", pytest.fail)
    refuses(r"no space left on the disk \(199 MB are free\); a build wants 200 MB", name, repository, store)


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(repository, store, copies, monkeypatch):
    write(repository, {"nanoserve/new.py": ""})

    def copy(source, target, **options):
        Path(target).write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(shutil, "copy", copy)
    refuses(r"no space left on the disk \(No space left on device\)", "HEAD+dirty", repository, store)


@pytest.mark.parametrize(("free_bytes", "says"), [(9_000_000, "no space left on the disk"), (10**9, "unable to write")])
def test_where_pip_fails_for_want_of_space_the_disk_is_named(shared, store, monkeypatch, free_bytes, says):
    def fill(source, installed):
        installed.mkdir()
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 0, free_bytes))
        return 1, "unable to write a file"

    monkeypatch.setattr(builds, "_pip_install", fill)
    refuses(says, "fast", shared, store)


def test_a_store_that_cannot_be_written_is_named(shared, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"could not be built in .*file/store"):
        built("fast", shared, tmp_path / "file" / "store")


# Interrupted, killed, and two at once.


def start(name, root, store, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-c", BUILDS, name, root, store]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def wait_for(what, within_s=60.0):
    for _ in range(int(within_s / 0.02)):
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s} s")


def processes_in(sign):
    """setup.py's and pip's, once setup.py runs."""
    return [psutil.Process(int(pid)) for pid in wait_for(lambda: sign.exists() and sign.read_text()).split()]


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_an_interrupt_ends_pip_and_leaves_nothing(shared, store, tmp_path):
    (tmp_path / "system").mkdir()
    builder = start("main", shared, store, SIGN=str(tmp_path / "sign"), TMPDIR=str(tmp_path / "system"))
    children = processes_in(tmp_path / "sign")
    assert any(path.name.startswith("tmp-") for path in store.iterdir())
    builder.send_signal(signal.SIGINT)
    _, errors = builder.communicate(timeout=60)
    assert errors.strip().endswith("KeyboardInterrupt")
    wait_for(lambda: all(map(is_gone, children)))
    assert visible(store) == []
    assert list((tmp_path / "system").iterdir()) == []


def test_what_a_killed_build_left_is_removed_by_the_next_and_nothing_is_waited_for(shared, store, tmp_path):
    builder = start("main", shared, store, SIGN=str(tmp_path / "sign"))
    children = processes_in(tmp_path / "sign")
    try:
        builder.kill()
        builder.communicate(timeout=60)
        assert [name[:4] for name in visible(store)] == ["tmp-"]
        said = []
        found = built("main", shared, store, said.append)
    finally:
        for child in children:
            child.kill()
    assert visible(store) == [found.folder.name]
    assert [line.partition(":")[0] for line in said] == [f"main ({found.folder.name[:12]})"]
    prove_built(found.folder / "nanoserve", found.folder, found.source_sha256)


def test_two_at_once_build_once_and_nobody_sees_half(shared, store):
    folder = store / git(shared, "rev-parse", "fast^{commit}")
    builders = [start("fast", shared, store) for _ in range(2)]
    while any(builder.poll() is None for builder in builders):
        if folder.exists():
            assert (folder / "build.json").exists()
            assert (folder / "nanoserve" / "kept.py").exists()
        time.sleep(0.001)
    outputs = [builder.communicate() for builder in builders]
    assert [errors for _, errors in outputs] == ["", ""]
    first, second = (json.loads(output) for output, _ in outputs)
    assert first["folder"] == second["folder"] == str(folder)
    assert first["source_sha256"] == second["source_sha256"] == source_hash(folder / "nanoserve")
    assert sum("builds it in" in text for text in first["said"] + second["said"]) == 1
    assert visible(store) == [folder.name]


# What a worker proves about what it has imported.


def test_the_builds_own_package_is_accepted(fast):
    prove_built(fast.folder / "nanoserve", fast.folder, fast.source_sha256)


def test_a_package_from_anywhere_else_is_refused(fast, shared, tmp_path):
    shutil.copytree(fast.folder / "nanoserve", tmp_path / "nanoserve")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "nanoserve").symlink_to(tmp_path / "nanoserve")
    for package, folder in (
        (shared / "nanoserve", fast.folder),
        (tmp_path / "nanoserve", fast.folder),
        (fast.folder / "nanoserve", fast.folder.parent),
        (tmp_path / "link" / "nanoserve", tmp_path / "link"),
    ):
        with pytest.raises(ForeignPackageError, match=r"which is not the build in .*nothing was measured"):
            prove_built(package, folder, fast.source_sha256)


def test_a_package_that_has_changed_since_is_refused(fast, tmp_path):
    shutil.copytree(fast.folder, tmp_path / "build")
    package = tmp_path / "build" / "nanoserve"
    prove_built(package, tmp_path / "build", fast.source_sha256)
    (package / "kept.py").write_text("KEPT = False\n")
    with pytest.raises(ForeignPackageError, match=r"have changed since it was built; nothing was measured"):
        prove_built(package, tmp_path / "build", fast.source_sha256)


def test_a_build_is_a_value(fast):
    assert isinstance(fast, Build)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fast.source_sha256 = ""
