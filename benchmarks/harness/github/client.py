"""Speaks GitHub's REST API: access from the environment, all pages of a list, one error for whatever goes wrong.

Knows HTTP and a token, which it never lets out. Refuses to know what an issue or a comment is about.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from benchmarks.harness.errors import GitHubError

if TYPE_CHECKING:
    import httpx2

Json = dict[str, Any]
T = TypeVar("T")

_MENDS = {
    "GITHUB_TOKEN": "export GITHUB_TOKEN=... (a token that may write issues and pull requests)",
    "GITHUB_REPOSITORY": "export GITHUB_REPOSITORY=owner/name",
    "GITHUB_API_URL": "export GITHUB_API_URL=https://api.github.com",
}
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_BUSY = frozenset({429, 500, 502, 503, 504})
_NUM_TRIES = 4
_MAX_WAIT_S = 120.0
_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who asks, about which repository, and where."""

    token: str = dataclasses.field(repr=False)
    repository: str
    api_url: str


def access_from(environment: Mapping[str, str]) -> Access:
    """What GitHub's runners set, and a person exports. Raises GitHubError naming what is missing or odd."""
    for name, mend in _MENDS.items():
        if not environment.get(name, "").strip():
            raise GitHubError(f"{name} is not set: {mend}")
    token, repository, api_url = (environment[name].strip() for name in _MENDS)
    if not re.fullmatch(r"[!-~]+", token):
        raise GitHubError(f"GITHUB_TOKEN holds a character that no token has: {_MENDS['GITHUB_TOKEN']}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise GitHubError(f"GITHUB_REPOSITORY is {repository!r}, no owner and name: {_MENDS['GITHUB_REPOSITORY']}")
    return Access(token=token, repository=repository, api_url=_checked_url(api_url))


def _checked_url(url: str) -> str:
    """A token does not travel in the clear, except to this machine."""
    parts = urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOCAL):
        return url.rstrip("/")
    shown = f"{parts.scheme}://{parts.hostname or ''}"
    raise GitHubError(f"GITHUB_API_URL must begin with https://, not {shown}: {_MENDS['GITHUB_API_URL']}")


class GitHub:
    """One repository. Every method raises GitHubError; what it says holds no token."""

    def __init__(self, access: Access, http: "httpx2.Client") -> None:
        self._access, self._http = access, http

    def send(self, method: str, path: str, body: Json | None = None, **query: Any) -> Any:
        """What is answered, parsed. `path` is below the repository."""
        return self._answer(method, path, body, query)[0]

    def pages(self, path: str, **query: Any) -> Iterator[Json]:
        """Every item of a list, whatever the size of a page."""
        page, has_more = 1, True
        while has_more:
            items, has_more = self._answer("GET", path, None, {**query, "per_page": 100, "page": page})
            if not isinstance(items, list):
                raise self._error(f"GET {path}: the answer is no list", None)
            yield from items
            page += 1

    def _answer(self, method: str, path: str, body: Json | None, query: Json) -> tuple[Any, bool]:
        """The parsed answer, and whether another page follows."""
        import httpx2

        url = f"{self._access.api_url}/repos/{self._access.repository}/{path}"
        headers = {"authorization": f"Bearer {self._access.token}", "accept": "application/vnd.github+json"}
        try:
            answer = self._http.request(method, url, headers=headers, json=body, params=query, timeout=_TIMEOUT_S)
            if not answer.is_success:
                raise self._error(f"{method} {path}: {answer.status_code} {_said(answer)}", _wait_s(answer))
            return answer.json(), "next" in answer.links
        except httpx2.RequestError as error:
            raise self._error(f"{method} {path}: {error}", 1.0) from None
        except ValueError:
            raise self._error(f"{method} {path}: the answer is no JSON", None) from None

    def _error(self, text: str, wait_s: float | None) -> GitHubError:
        return GitHubError(f"GitHub, {text}".replace(self._access.token, "***"), wait_s)


def _said(answer: "httpx2.Response") -> str:
    """The reason that GitHub gives, else the beginning of what came."""
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def _wait_s(answer: "httpx2.Response") -> float | None:
    """How long GitHub wants to be left alone; None where the same question gets the same answer."""
    asked = answer.headers.get("retry-after", "")
    is_limited = answer.status_code == 403 and (asked or answer.headers.get("x-ratelimit-remaining") == "0")
    if answer.status_code not in _BUSY and not is_limited:
        return None
    return float(asked) if asked.isdecimal() else 1.0


def persist(attempt: Callable[[], T], sleep: Callable[[float], None]) -> T:
    """Try again where that may help, a few times, as late as GitHub asks.

    `attempt` has to look anew each time: an answer that broke off may have done what it was asked to do.
    """
    for number in range(1, _NUM_TRIES):
        try:
            return attempt()
        except GitHubError as error:
            if error.wait_s is None or error.wait_s > _MAX_WAIT_S:
                raise
            sleep(max(error.wait_s, 2.0 ** (number - 1)))
    return attempt()
