"""Which commit a revision is, and its files in a folder of their own.

Knows git, and only reads from it: no ref, worktree, stash or index of the checkout is touched. Refuses to know what a
commit holds.
"""

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.errors import BuildError

_DIRTY = "+dirty"
_NUM_LINES_OF_GIT = 8
_ABOUT_A_REPOSITORY = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE",
)  # fmt: skip
"""Set inside a git hook, where they name another index or another repository than the folder's own."""

_LEAVE_ALONE = ("core.hooksPath=/dev/null", "core.splitIndex=false", "core.sparseCheckout=false")
"""A hook would run, a split index would be written into .git, a sparse checkout would leave files out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """`name` as the user typed it; `commit` in full, followed by `+dirty` for the working tree as it is."""

    name: str
    commit: str

    @property
    def is_dirty(self) -> bool:
        """Whether it is the working tree, with changes that no commit holds."""
        return self.commit.endswith(_DIRTY)

    def __str__(self) -> str:
        """For people: the name, and the commit in short."""
        short = f"{self.commit[:12]}{_DIRTY if self.is_dirty else ''}"
        is_hash = self.commit.startswith(self.name.removesuffix(_DIRTY))
        return short if is_hash else f"{self.name} ({short})"


class Logged(NamedTuple):
    """A commit of a history, and the first line of what it says of itself."""

    commit: str
    subject: str


def resolve(name: str, root: Path) -> Revision:
    """The commit that git knows under `name` in the checkout `root`.

    `HEAD+dirty`, or `+dirty` after any name of the same commit, is the working tree as it is: tracked files with their
    changes, and untracked ones that git does not ignore. Without changes it is HEAD. Raises BuildError for a name that
    is unknown, ambiguous or no commit, and where `root` is no checkout.
    """
    if not name or name.startswith("-"):
        raise BuildError(f"{name!r} is no revision: name a branch, a tag or a commit, or HEAD+dirty")
    _check_checkout(root)
    wanted = name.removesuffix(_DIRTY)
    commit = _commit_of(wanted, root)
    if wanted == name:
        return Revision(name=name, commit=commit)
    _check_head(name, commit, root)
    has_changes = _git(root, "status", "--porcelain", "--untracked-files=normal")
    return Revision(name=name, commit=commit + _DIRTY if has_changes else commit)


def first_parents(head: str, root: Path, *, since: str | None = None, limit: int) -> tuple[Logged, ...]:
    """`head` and its first parents, the newest first, without those that `since` has: what was merged, one by one."""
    without = [] if since is None else [f"^{since}"]
    told = _git(
        root, "log", "--first-parent", "--no-show-signature", "--no-color", "--format=%H %s", f"--max-count={limit}",
        head, *without, "--",
    )  # fmt: skip
    lines = told.decode(errors="replace").splitlines()
    return tuple(Logged(*line.split(" ", 1)) for line in lines)


def has_changed(revision: Revision, root: Path, *paths: str) -> bool:
    """Whether the checkout has other tracked contents below `paths` than the commit has."""
    if revision.is_dirty:
        return False  # it is the checkout
    return _run(root, "diff", "--quiet", revision.commit, "--", *paths).returncode != 0


def export(revision: Revision, root: Path, folder: Path) -> None:
    """Write the files of the commit, or of the working tree, into `folder`, which must not exist yet.

    Of a commit these are all tracked files, as a checkout has them, whatever .gitattributes keeps out of archives. An
    index is left beside `folder`. Raises BuildError or OSError.
    """
    folder.mkdir()
    if revision.is_dirty:
        _check_head(revision.name, revision.commit.removesuffix(_DIRTY), root)
        _copy_working_tree(root, folder)
        return
    settings = (word for setting in _LEAVE_ALONE for word in ("-c", setting))
    places = {"GIT_INDEX_FILE": f"{folder}.index", "GIT_WORK_TREE": str(folder)}
    _git(root, *settings, "read-tree", "--reset", "-u", revision.commit, places=places)


def _copy_working_tree(root: Path, folder: Path) -> None:
    listed = os.fsdecode(_git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"))
    for name in sorted({*listed.split("\0")} - {""}):
        source, target = root / name, folder / name
        is_reached_by_links = source.parent.resolve() != root.resolve() / Path(name).parent
        if is_reached_by_links or not (source.is_symlink() or source.is_file()):
            continue  # deleted, or another repository
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target, follow_symlinks=False)


def _check_checkout(root: Path) -> None:
    done = _run(root, "rev-parse", "--show-toplevel")
    if done.returncode:
        raise BuildError(
            f"{root} is no git checkout that git can use, and commits come from one: git clone it.{_words(done)}"
        )
    top = Path(os.fsdecode(done.stdout.removesuffix(b"\n")))
    if top.resolve() != root.resolve():
        raise BuildError(f"{root} is no git checkout of its own, it lies inside that of {top}: git clone it")


def _check_head(name: str, commit: str, root: Path) -> None:
    """Raise unless `commit` is the one that the working tree's changes are changes of."""
    head = _commit_of("HEAD", root)
    if commit != head:
        raise BuildError(
            f"{name}: only the working tree can be dirty, and it has changes on top of HEAD, which is {head[:12]}; "
            f"this is {commit[:12]}. Compare HEAD+dirty, or commit the changes"
        )


def _commit_of(name: str, root: Path) -> str:
    """The full hash; of an annotated tag, the one of the commit that it names."""
    found = _run(root, "-c", "core.warnAmbiguousRefs=true", "rev-parse", "--verify", name)
    if b"is ambiguous" in found.stderr and not found.returncode:
        raise BuildError(
            f"{name!r} names a branch and a tag: say refs/heads/{name} or refs/tags/{name}.{_words(found)}"
        )
    if not found.returncode:
        found = _run(root, "rev-parse", "--verify", f"{found.stdout.decode().strip()}^{{commit}}")
    commit = found.stdout.decode().strip()
    if found.returncode or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise BuildError(f"unknown revision {name!r}: {_what_was_looked_for(root)}.{_words(found)}")
    return commit


def _what_was_looked_for(root: Path) -> str:
    looked = f"{root} has no branch, tag or commit of that name"
    listed = _run(root, "for-each-ref", "--sort=-committerdate", "--count=8", "--format=%(refname:short)", *_BRANCHES)
    branches = ", ".join(os.fsdecode(listed.stdout).split())
    if branches:
        looked += f". The latest branches here: {branches}"
    if _run(root, "rev-parse", "--is-shallow-repository").stdout.strip() == b"true":
        return f"{looked}. This clone is shallow, older commits are not in it: git fetch --unshallow"
    return f"{looked}. If it was pushed from elsewhere: git fetch"


_BRANCHES = ("refs/heads", "refs/remotes")


def _git(root: Path, *arguments: str, places: dict[str, str] | None = None) -> bytes:
    done = _run(root, *arguments, places=places)
    if done.returncode:
        raise BuildError(f"`git {' '.join(arguments)}` failed in {root}.{_words(done)}")
    return done.stdout


def _run(root: Path, *arguments: str, places: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Git on the folder's own repository, in English, without a lock that somebody else would run into."""
    kept = {name: value for name, value in os.environ.items() if name not in _ABOUT_A_REPOSITORY}
    environment = kept | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"} | (places or {})
    try:
        return subprocess.run(
            ["git", *arguments], cwd=root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as error:
        raise BuildError(f"git cannot run in {root}: {error}; commits need git, and a folder that exists") from error


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    said = [line for line in lines if line != "fatal: Needed a single revision"][-_NUM_LINES_OF_GIT:]
    return "\n".join([" git says:", *said]) if said else ""
