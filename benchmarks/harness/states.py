"""Arms in states of the prefix cache: what a plan has to say of them, what is proven of them, and what they tell.

Knows plans, declared metrics and samples. Refuses to know in which order things run, and which state means what
(`scenes.py`). A number of two states would be one of two arms if two arms were in one of them: it is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.loop import Plan, Proof, Sample, Subject
from benchmarks.harness.metrics import Metric
from benchmarks.harness.proof import check_reuse
from benchmarks.harness.results import Flag, Measurement, root_of_pool, summarise_states
from benchmarks.harness.scenes import STATES, Prompts


class Told(NamedTuple):
    """What the states tell, and why a number is none, or has no interval, by metric."""

    measurements: list[Measurement]
    why: dict[str, str]

    @property
    def flags(self) -> list[Flag]:
        """One for each number that does not exist."""
        none = [m for m in self.measurements if m.value is None and m.metric.name in self.why]
        return [Flag(kind="undefined", arm=m.arm, what=f"{m.metric.title}: {self.why[m.metric.name]}") for m in none]


def states_of(plan: Plan) -> dict[str, str]:
    """The state of every arm. Raises InstrumentError for an arm without one."""
    for arm in plan.arms:
        if arm not in plan.states:
            raise InstrumentError(f"arm {arm!r} has no option 'state'; it is one of: {', '.join(STATES)}")
    return {arm: plan.states[arm] for arm in plan.arms}


def refuse(declared: Sequence[Metric], states: Mapping[str, str], num_loads: int) -> None:
    """Raise InstrumentError for a metric that so many loads, or the arms in these states, do not give."""
    for each in declared:
        if each.spans_loads != (num_loads > 1):
            needs = "several of them" if each.spans_loads else "one: make it a parameter of the test"
            what = "sizes" if each.of_sizes else "lengths of the prefix"
            raise InstrumentError(f"{each.name} does not come of {num_loads} {what}, but of {needs}")
        for state in each.states:
            arms = [arm for arm in states if states[arm] == state]
            if len(arms) != 1:
                told = ", ".join(f"{arm} is {states[arm]}" for arm in states)
                raise InstrumentError(
                    f"{each.name} takes one arm in each of the states {', '.join(each.states)}; {told}"
                )


def proofs(
    states: Mapping[str, str], plan: Plan, prompts: Prompts, sizes: Sequence[tuple[int, int]]
) -> list[tuple[str, Proof]]:
    """For each primed arm, and each of these lengths of prefix and suffix: that what it finds gives the right logits.

    It comes before any timing: a reuse whose logits are wrong has no time. Of prompts that nothing else runs.
    """
    primed = [arm for arm, state in states.items() if state == "primed"]
    return [(arm, _proof(arm, plan.arms[arm], prompts, *each)) for arm in primed for each in dict.fromkeys(sizes)]


def _proof(arm: str, options: Mapping[str, Any], prompts: Prompts, prefix_tokens: int, suffix_tokens: int) -> Proof:
    def prove(subject: Subject) -> None:
        prompt = prompts(prefix_tokens + suffix_tokens, 1, "proof", prefix_tokens)
        num_found = subject.num_reusable(prefix_tokens, len(prompt), **options)
        if num_found is None:  # somebody else's engine: it shows no logits either
            return
        reuse = subject.reuse_logits(prompt, prefix_tokens, **options)
        check_reuse(reuse, len(prompt) - num_found, subject.relative_tolerance, f"{arm}, a prefix of {prefix_tokens}")

    return prove


def tell(declared: Sequence[Metric], states: Mapping[str, str], samples: Sequence[Sample]) -> Told:
    """The measurements of those declared metrics that are of states."""
    told = Told([], {})
    num_loads = len(next(iter(samples[0].values()))) if samples else 0
    arms = {state: arm for arm, state in states.items() if list(states.values()).count(state) == 1}
    for each in declared:
        if each.among is not None:
            by_state = [{state: sample[arm][0] for state, arm in arms.items()} for sample in samples]
            told.measurements.append(summarise_states(each, by_state))
        elif each.pooled is not None and samples:
            root = each.pooled([
                {state: [sample[arm][load] for sample in samples] for state, arm in arms.items()}
                for load in range(num_loads)
            ])  # fmt: skip
            told.measurements.append(root_of_pool(each, root, len(samples)))
            told.why.update({each.name: root.why} if root.why else {})
    return told
