"""Did the run do the work? Asked after every run, off the clock.

Knows what a workload promises and when two arms may differ: in reduced precision two orders of summation can
swap tokens whose logits are equal within rounding, so a difference is accepted only where it is such a near-tie.
"""

from collections.abc import Callable, Sequence

from benchmarks.harness.errors import WrongOutputError
from benchmarks.harness.timing import RunTiming
from benchmarks.harness.workload import Workload

NextLogits = Callable[[Sequence[int]], Sequence[float]]
"""Token ids so far -> logits of the next token, one per vocabulary entry."""


def check_length(run: RunTiming, workload: Workload, arm: str, *, may_end_early: bool = False) -> None:
    """Raise WrongOutputError unless the run produced exactly what was asked, ended by its length.

    With `may_end_early` it may also have ended by itself: where a server cannot be told to ignore EOS.
    """
    if may_end_early and run.finish_reason == "stop" and 1 <= run.num_tokens <= workload.new_tokens:
        return
    if run.num_tokens != workload.new_tokens:
        raise WrongOutputError(
            f"{arm} produced {run.num_tokens} tokens where the workload asks for {workload.new_tokens}"
        )
    if run.finish_reason != "length":
        raise WrongOutputError(f"{arm} ended with {run.finish_reason!r} where the workload asks for 'length'")


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ, or None."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)


def check_same_tokens(
    prompt: Sequence[int],
    outputs: dict[str, tuple[int, ...]],
    next_logits: NextLogits,
    relative_tolerance: float,
) -> list[str]:
    """Raise WrongOutputError unless all arms agree with the first, up to near-ties; return a note for each near-tie.

    A near-tie is a difference where both tokens' logits lie within `relative_tolerance` times the largest absolute
    logit of the best one. What follows a near-tie cannot be compared.
    """
    (reference, expected), *others = outputs.items()
    notes = []
    for arm, output in others:
        at = first_difference(expected, output)
        if at is None:
            continue
        logits = next_logits([*prompt, *expected[:at]])
        gap = max(logits) - min(logits[expected[at]], logits[output[at]])
        allowed = relative_tolerance * max(map(abs, logits))
        what = f"{arm} and {reference} differ at token {at}: {output[at]} and {expected[at]}, {gap:.2g} below the best"
        if not gap <= allowed:  # a NaN is no near-tie
            raise WrongOutputError(f"{what}, more than the {allowed:.2g} that rounding explains")
        notes.append(f"{what}, a near-tie in this precision")
    return notes
