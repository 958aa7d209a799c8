"""Which commits a night is about: what HEAD is compared with, and what asv has not seen yet.

Knows git's history, what the last night left, and whether a commit builds. Refuses to measure.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.errors import BuildError, InstrumentError
from benchmarks.harness.gate.revisions import Logged, first_parents, resolve
from benchmarks.harness.nightly.state import MAX_LEFT, State

WhyNot = Callable[[str], str]
"""Why a commit does not build, "" for one that does."""

_MAX_BACK = 20
"""So far a first night looks for a parent that builds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`new` are the commits that asv has yet to see, HEAD apart, the newest first; `between` what changed since base.

    `base` is None where there is nothing to compare HEAD with. `skipped` says why a commit does not build.
    """

    head: Logged
    base: str | None
    new: tuple[str, ...]
    between: tuple[Logged, ...]
    skipped: dict[str, str]
    notes: tuple[str, ...] = ()


def look_back(root: Path, state: State, why_not: WhyNot) -> History:
    """Raises BuildError outside of a checkout, InstrumentError where git has lost what the last night went by."""
    (head,) = first_parents(resolve("HEAD", root).commit, root, limit=1)
    skipped = {head.commit: why} if (why := why_not(head.commit)) else {}
    base: str | None
    new: tuple[str, ...]
    notes: tuple[str, ...] = ()
    if state.last_good is None:
        base, broken = _nearest_parent(head.commit, root, why_not)
        skipped |= broken
        new = () if base is None else (base,)
    else:
        base = good = _last_good(state.last_good, root)
        if good != head.commit and (why := why_not(good)):
            base, skipped = None, skipped | {good: why}
        new, notes = _new_since(head.commit, root, state)
    between = () if base is None else first_parents(head.commit, root, since=base, limit=MAX_LEFT)
    return History(head=head, base=base, new=new, between=between, skipped=skipped, notes=notes)


def _nearest_parent(head: str, root: Path, why_not: WhyNot) -> tuple[str | None, dict[str, str]]:
    """The first parent of HEAD, or the nearest before it that builds, and those between them that do not."""
    broken: dict[str, str] = {}
    for parent in first_parents(head, root, limit=_MAX_BACK)[1:]:
        why = why_not(parent.commit)
        if not why:
            return parent.commit, broken
        broken[parent.commit] = why
    return None, broken


def _last_good(commit: str, root: Path) -> str:
    try:
        return resolve(commit, root).commit
    except BuildError as error:
        raise InstrumentError(
            f"the last good commit, {commit[:12]}, is not in this clone any more: {error}\nIf history was rewritten, "
            f"declare another one good: python -m benchmarks nightly --accept COMMIT"
        ) from error


def _new_since(head: str, root: Path, state: State) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What came after the last measured commit, and what earlier nights ran out of time for."""
    try:
        measured = resolve(state.last_measured or head, root).commit
        came = first_parents(head, root, since=measured, limit=MAX_LEFT + 1)
    except BuildError:
        return (), (f"{str(state.last_measured)[:12]}, which was measured last, is not in this clone any more",)
    new = dict.fromkeys([each.commit for each in came] + [*state.left])
    new.pop(head, None)
    kept = tuple(new)[:MAX_LEFT]
    num_lost = len(new) - len(kept)
    return kept, (f"{num_lost} older commits stay out of asv's history: a night takes {MAX_LEFT}",) if num_lost else ()
