"""An OpenAI-compatible endpoint: where it is, what it is asked, and what it takes of what not every server knows.

Knows the fields of `/v1/completions`, and a client that is given. Refuses to know clocks and event streams. Prompts are
token ids, and no prompt has an id that a small vocabulary lacks; an endpoint that refuses ids gets words instead. A
field that is refused is left out, and said to be: without `ignore_eos` answers may end early, without
`return_token_ids` tokens are counted as well as the chunks tell.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.errors import SourceError
from benchmarks.harness.serving import Ask
from benchmarks.harness.sources.answer import quote

NUM_IDS = 256
"""Every vocabulary has so many ids."""

_EXTENSIONS: dict[str, Any] = {
    "return_token_ids": True,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
_LOSSES = {
    "return_token_ids": "tokens are counted by what each chunk tells",
    "ignore_eos": "answers may end early",
    "stream_options": "nothing holds the number of tokens against the endpoint's own",
}
_REFUSALS = (400, 422)
_TEXT = (
    "able age air area art back base book call car case city cost day door end eye face fact farm film fire food form "
    "game girl hand head help home hour idea job land law life line list loss love man mind name need night note page "
    "part plan rate road room rule sea side size song step table team time town tree"
)
_WORDS = _TEXT.split()
_PROBE = Ask("probe", 0.0, tuple(range(40, 56)), 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """`base_url` is the one that OpenAI's own client takes: `http://host:8000/v1`."""

    base_url: str
    model: str
    key: str | None = None
    left_out: frozenset[str] = frozenset()
    takes_ids: bool = True

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def is_secure(self) -> bool:
        """Whether certificates have to be loaded, which takes a while."""
        return self.base_url.startswith("https")

    @property
    def may_end_early(self) -> bool:
        return "ignore_eos" in self.left_out

    @property
    def notes(self) -> list[str]:
        """What the endpoint does not take, and what is lost by that, in a sentence each."""
        refused = [f"the endpoint refuses {name}: {_LOSSES[name]}" for name in _EXTENSIONS if name in self.left_out]
        return refused if self.takes_ids else [*refused, "the endpoint refuses token ids: prompts are words"]

    def body(self, ask: Ask) -> dict[str, Any]:
        """What is sent for one request: greedy, streamed, of a set length."""
        prompt = list(ask.prompt_ids) if self.takes_ids else _words(ask.prompt_ids)
        extensions = {name: value for name, value in _EXTENSIONS.items() if name not in self.left_out}
        fixed = {"model": self.model, "prompt": prompt, "max_tokens": ask.new_tokens, "temperature": 0, "stream": True}
        return fixed | extensions


def _words(ids: tuple[int, ...]) -> str:
    """About as many tokens as there are ids."""
    return " ".join(_WORDS[each % len(_WORDS)] for each in ids)


def models_of(client: Any) -> list[str]:
    """The names that the endpoint gives its models. Raises SourceError where it does not answer as it should."""
    try:
        response = client.get("models")
    except Exception as error:
        raise SourceError(f"{client.base_url}: no answer: {type(error).__name__}: {error}") from error
    if response.status_code != 200:
        raise SourceError(f"{response.url}: status {response.status_code}: {quote(response.text)}")
    try:
        return [str(each["id"]) for each in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{response.url}: no list of models: {quote(response.text)}") from error


def choose_model(known: list[str], asked: str | None) -> str:
    """The model that is asked for, else the endpoint's first. Raises SourceError, with the choices, for another."""
    if asked in known or (asked is None and known):
        return asked or known[0]
    raise SourceError(f"the endpoint has no model {asked!r}; --model is one of: {', '.join(known) or 'none'}")


def agreed(endpoint: Endpoint, client: Any) -> Endpoint:
    """The same endpoint, asked for nothing that it refuses. Raises SourceError where it refuses all there is."""
    refusal = _refusal(client, endpoint)
    while refusal is not None:
        endpoint = _with_less(endpoint, refusal)
        refusal = _refusal(client, endpoint)
    for name in sorted(endpoint.left_out):  # it may have been another one that was to blame
        more = dataclasses.replace(endpoint, left_out=endpoint.left_out - {name})
        endpoint = endpoint if _refusal(client, more) is not None else more
    return endpoint


def _refusal(client: Any, endpoint: Endpoint) -> str | None:
    """What the endpoint says against a request of this kind, None where it answers. Raises SourceError otherwise."""
    try:
        response = client.post("completions", json=endpoint.body(_PROBE))
    except Exception as error:
        raise SourceError(f"{endpoint.base_url}: no answer: {type(error).__name__}: {error}") from error
    if response.status_code == 200:
        return None
    said = f"{response.url}: status {response.status_code}: {quote(response.text)}"
    if response.status_code not in _REFUSALS:
        raise SourceError(said)
    return said


def _with_less(endpoint: Endpoint, refusal: str) -> Endpoint:
    """Without the field that the refusal names, else without the next one, at last with words."""
    left = list(_candidates(endpoint))
    name = next((each for each in left if each in refusal), left[0] if left else None)
    if name is None:
        raise SourceError(refusal)
    if name == "prompt":
        return dataclasses.replace(endpoint, takes_ids=False)
    return dataclasses.replace(endpoint, left_out=endpoint.left_out | {name})


def _candidates(endpoint: Endpoint) -> Iterator[str]:
    yield from (name for name in _EXTENSIONS if name not in endpoint.left_out)
    if endpoint.takes_ids:
        yield "prompt"
