"""Somebody else's server as a subject: nothing of it is in this process, so nothing is known of it but what it answers.

Knows an endpoint and what it says of its models. Every arm goes through HTTP (`over_http.py`); what only an engine in
this process could tell is unknown, and refused where it cannot be left out.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.proof import Reuse
from benchmarks.harness.serving import Ask, Told
from benchmarks.harness.sources.endpoint import NUM_IDS, Endpoint, agreed, choose_model, models_of
from benchmarks.harness.timing import Emission


class ElsewhereSubject:
    """One model behind an endpoint."""

    vocab_size = NUM_IDS
    relative_tolerance = 0.0

    def __init__(self, endpoint: Endpoint, known: Sequence[str]) -> None:
        self.endpoint, self.name = endpoint, endpoint.model
        self._known = list(known)
        self.may_end_early = endpoint.may_end_early

    @classmethod
    def reach(cls, url: str, model: str | None, key: str | None) -> "ElsewhereSubject":
        """Ask which models there are, and what a request may hold. Raises SourceError where nobody answers."""
        import httpx2

        bare = Endpoint(base_url=url.rstrip("/"), model="", key=key)
        how: dict[str, Any] = {"headers": bare.headers, "verify": bare.is_secure, "trust_env": False}
        with httpx2.Client(base_url=bare.base_url, timeout=300.0, **how) as client:
            known = models_of(client)
            asked = Endpoint(base_url=bare.base_url, model=choose_model(known, model), key=key)
            return cls(agreed(asked, client), known)

    def describe(self) -> dict[str, Any]:
        """The subject's part of the provenance."""
        unknown = dict.fromkeys(("weights", "device_name", "num_threads", "attention"))
        where = {"url": self.endpoint.base_url, "models": self._known, "notes": self.endpoint.notes}
        return {"model": self.name, "dtype": "unknown", "device": "elsewhere", **unknown, "endpoint": where}

    def notes(self) -> list[str]:
        return self.endpoint.notes

    def release(self) -> None:
        """Nothing was taken."""

    def forget(self, **arm: Any) -> None:
        """Nobody can tell it to."""

    def cost(self, **arm: Any) -> None:
        """What its steps cost is not known."""

    def num_reusable(self, num_stored: int, num_prompt_tokens: int, **arm: Any) -> None:
        """Nor what it keeps."""

    def stream(self, prompt_ids: Sequence[int], num_new_tokens: int, **arm: Any) -> Iterator[Emission]:
        self._refuse()

    def serve(self, inbox: deque[Ask], **arm: Any) -> Iterator[Told]:
        self._refuse()

    def next_logits(self, token_ids: Sequence[int]) -> Sequence[float]:
        self._refuse()

    def reuse_logits(self, prompt_ids: Sequence[int], prefix_tokens: int, **arm: Any) -> Reuse:
        self._refuse()

    def predict_hits(self, prompts: Sequence[Sequence[int]], **arm: Any) -> Sequence[int]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InstrumentError(f"{self.endpoint.base_url} is reached through HTTP only: this needs an engine at hand")
