"""One issue per machine while its nights are worse, another while there is no data: opened, kept up to date, closed.

Knows what a verdict means for an issue. What is done is decided first, from what is there; doing it twice changes
nothing. Refuses to know how a night was measured.

    verdict                     performance-regression            performance-no-data
    worse                       opened; comment on a new head     closed
    same, better                closed                            closed
    cannot tell, contaminated   left as it is                     closed
    no data, or not finished    left as it is                     opened, or kept up to date
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.harness.github.client import GitHub, Json
from benchmarks.harness.github.wording import body_of, comment_of, is_marked, marker

if TYPE_CHECKING:
    from benchmarks.harness.nightly.folder import Night


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A reason for an issue. `label` also names it."""

    label: str
    title: str
    explained: str


REGRESSION = Kind(
    "performance-regression",
    "Performance: worse on {machine}",
    "This issue follows the nights of the machine: a night that is the same or better closes it, and one that cannot "
    "tell leaves it open.",
)
NO_DATA = Kind(
    "performance-no-data",
    "Performance: no data of {machine}",
    "Nothing was compared, so nothing is known: no data is not good news. A night with data closes this issue.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One thing to do: `told` says it to a person. A comment whose marker is there already is not written again."""

    told: str
    method: str
    path: str
    body: Json
    once: tuple[str, ...] = ()


def find(github: GitHub, kind: Kind, machine: str) -> Json | None:
    """The open issue of a machine, the oldest where people made two."""
    listed = github.pages("issues", state="open", labels=kind.label)
    own = [each for each in listed if is_marked(each["body"], kind.label, machine)]
    found = [each for each in own if "pull_request" not in each]
    return min(found, key=lambda each: int(each["number"]), default=None)


def steps(night: "Night", regression: Json | None, silence: Json | None, run_url: str = "") -> list[Step]:
    """What has to be done, given the open issues."""
    if not night.is_finished or night.verdict == "no data":
        return list(_kept(NO_DATA, night, silence, run_url))
    found = list(_closed(silence, "There is data again:", night, run_url))
    if night.verdict == "worse":
        found += _kept(REGRESSION, night, regression, run_url)
    elif night.verdict in ("same", "better"):
        found += _closed(regression, "Recovered:", night, run_url)
    return found


def _kept(kind: Kind, night: "Night", issue: Json | None, run_url: str) -> Iterator[Step]:
    mark = marker(kind.label, night.machine, night.head)
    title = kind.title.format(machine=night.machine)
    body = body_of(night, mark, kind.explained, run_url)
    if issue is None:
        yield Step(f"open {title!r}", "POST", "issues", {"title": title, "body": body, "labels": [kind.label]})
        return
    if not is_marked(issue["body"], kind.label, night.machine, night.head):
        yield _comment(issue, "Still so, at another commit:", night, run_url, ("head", night.head))
    if issue["body"] != body:
        yield Step(f"update #{issue['number']}", "PATCH", f"issues/{issue['number']}", {"title": title, "body": body})


def _closed(issue: Json | None, told: str, night: "Night", run_url: str) -> Iterator[Step]:
    if issue is not None:
        yield _comment(issue, told, night, run_url, ("closed", night.head))
        done = {"state": "closed", "state_reason": "completed"}
        yield Step(f"close #{issue['number']}", "PATCH", f"issues/{issue['number']}", done)


def _comment(issue: Json, told: str, night: "Night", run_url: str, once: tuple[str, ...]) -> Step:
    body: dict[str, Any] = {"body": comment_of(night, marker(*once), told, run_url)}
    return Step(f"comment on #{issue['number']}: {told}", "POST", f"issues/{issue['number']}/comments", body, once)


def follow(github: GitHub, night: "Night", run_url: str = "", is_dry: bool = False) -> list[str]:
    """Bring the machine's issues in line with its newest night; what was done, in words."""
    regression, silence = (find(github, kind, night.machine) for kind in (REGRESSION, NO_DATA))
    return done(github, steps(night, regression, silence, run_url), is_dry)


def done(github: GitHub, wanted: Iterable[Step], is_dry: bool) -> list[str]:
    """Do it, or only say what would be done."""
    told = []
    for step in wanted:
        if not is_dry and not _is_there(github, step):
            github.send(step.method, step.path, step.body)
        told.append(f"would {step.told}" if is_dry else step.told)
    return told


def _is_there(github: GitHub, step: Step) -> bool:
    return bool(step.once) and any(is_marked(each["body"], *step.once) for each in github.pages(step.path))
