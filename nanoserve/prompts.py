"""What a caller may hand in as a prompt, or as a list of them.

Knows texts, ids and everything that only looks like one of them. Refuses to know tokenizers and models.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set

from nanoserve.config import SamplingParams
from nanoserve.errors import RequestError

Prompt = str | Sequence[int]


def as_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as plain integers, from a list, an array or a tensor. Raises RequestError for anything else."""
    try:
        return [operator.index(token_id) for token_id in prompt]
    except TypeError:
        raise RequestError(f"a prompt is a text or a sequence of token ids, not {str(prompt)[:60]!r}") from None


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or a flat sequence of ids is one prompt; any other sequence is a list of them. Raises RequestError."""
    if isinstance(prompts, Mapping | Set) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts are a text, token ids or a list of these, not {str(prompts)[:60]!r}")
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    is_one = bool(items) and all(hasattr(item, "__index__") and not getattr(item, "ndim", 0) for item in items)
    return [items] if is_one else items  # type: ignore[list-item, return-value]


def for_each(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams | None]:
    """Parameters for each prompt: the same for all, or as many as there are. Raises RequestError for other numbers."""
    every = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(every) != len(prompts):
        raise RequestError(f"{len(every)} sets of sampling parameters for {len(prompts)} prompts: give one, or as many")
    return every
