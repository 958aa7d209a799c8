"""One comment on a pull request, written once and kept up to date.

Knows how its own comment is told from others, and whose pull request a commit is. Refuses to know what it says: the
text may come from a stranger's run, and is treated so.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.errors import GitHubError
from benchmarks.harness.github.client import GitHub, Json
from benchmarks.harness.github.issues import Step, done
from benchmarks.harness.github.wording import MAX_CHARACTERS, calmed, is_marked, marker, whole

_WHO_MAY_WRITE = frozenset({"OWNER", "MEMBER", "COLLABORATOR"})
_NAME = "benchmarks"


def read(files: Sequence[Path]) -> str:
    """The files' text, one below the other, and no more of each than can be shown.

    Raises GitHubError for a file that cannot be read, for a link, which could lead anywhere, and when all are empty.
    """
    texts = [_text_of(path).strip() for path in files]
    if not any(texts):
        raise GitHubError(f"nothing to say: {', '.join(map(str, files))} is empty")
    return "\n\n".join(filter(None, texts))


def _text_of(path: Path) -> str:
    if path.is_symlink():
        raise GitHubError(f"{path} is a link: name the file itself")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise GitHubError(f"{path} cannot be read: {error.strerror}") from None


def pull_requests(github: GitHub, head: str, head_sha: str) -> list[int]:
    """The open ones whose branch is `head` (owner:branch) and stands at that commit; a newer push has its own run."""
    listed = github.pages("pulls", state="open", head=head)
    return sorted(int(each["number"]) for each in listed if each["head"]["sha"] == head_sha)


def stick(github: GitHub, number: int, text: str, is_dry: bool = False) -> list[str]:
    """Write the comment, or bring it up to date; what was done, in words."""
    body = whole(marker(_NAME), calmed(text))
    path = f"issues/{number}/comments"
    own = next((each for each in github.pages(path) if _is_own(each)), None)
    if own is None:
        return done(github, [Step(f"comment on #{number}", "POST", path, {"body": body})], is_dry)
    if own["body"] == body:
        return [f"#{number} says so already"]
    step = Step(f"update the comment on #{number}", "PATCH", f"issues/comments/{own['id']}", {"body": body})
    return done(github, [step], is_dry)


def _is_own(comment: Json) -> bool:
    """A stranger can copy the marker, and would then have a comment that we write for them."""
    is_trusted = comment["user"]["type"] == "Bot" or comment["author_association"] in _WHO_MAY_WRITE
    return is_trusted and is_marked(comment["body"], _NAME)
