"""What a run is asked to do, and prompts that are made for it.

Knows sizes and seeds. A prompt depends on nothing but its seed words, so both sides of a comparison, today and next
year, run the same one; prompts with different seed words share no beginning that a prefix cache could use.
"""

import dataclasses
import random

from benchmarks.harness.errors import InstrumentError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One request: `prompt_tokens` in, exactly `new_tokens` out, ending for the reason `length`."""

    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise InstrumentError(f"{field.name} must be at least 1, not {getattr(self, field.name)}")

    def prompt(self, vocab_size: int, *seed_words: object) -> tuple[int, ...]:
        """Token ids drawn evenly from the vocabulary, fixed by the workload and the seed words."""
        generator = random.Random(f"{self.prompt_tokens} {self.new_tokens} {seed_words}")
        return tuple(generator.randrange(vocab_size) for _ in range(self.prompt_tokens))
