"""What a subject keeps of itself when something is put around it: everything but how its steps are timed.

Knows a subject. Whoever wraps one says what becomes of `stream`, `serve` and `untimed`.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.loop import Subject
from benchmarks.harness.proof import Reuse


class Wrapped:
    """A subject inside another: what it is, and what it says of itself off the clock."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.vocab_size, self.relative_tolerance = subject.vocab_size, subject.relative_tolerance
        self.next_logits = subject.next_logits
        self.may_end_early = getattr(subject, "may_end_early", False)

    def forget(self, **arm: Any) -> None:
        self._subject.forget(**arm)

    def num_reusable(self, num_stored: int, num_prompt_tokens: int, **arm: Any) -> int | None:
        return self._subject.num_reusable(num_stored, num_prompt_tokens, **arm)

    def reuse_logits(self, prompt_ids: Sequence[int], prefix_tokens: int, **arm: Any) -> Reuse:
        return self._subject.reuse_logits(prompt_ids, prefix_tokens, **arm)

    def predict_hits(self, prompts: Sequence[Sequence[int]], **arm: Any) -> Sequence[int]:
        return self._subject.predict_hits(prompts, **arm)
