"""What comes before each run that is timed, and around it: the control, a wake, and a look at the server that is asked.

Knows a watch, a plan, a subject, and whoever's turn it is. Refuses to know pytest and what is measured.
"""

import contextlib
from collections.abc import Iterator

from benchmarks.harness.loop import Plan, Subject, Turn
from benchmarks.harness.over_http import OverHttp
from benchmarks.harness.watch import Watch
from benchmarks.harness.workload import Workload

_WAKING = Workload(prompt_tokens=8, new_tokens=2)


def looked_at(over: OverHttp | None, plan: Plan) -> Turn:
    """Around each run a look at its server, where it has one; see `OverHttp.looked_at`."""
    if over is None:
        return lambda arm, number: contextlib.nullcontext()
    return lambda arm, number: over.looked_at(arm, plan.arms[arm], number)


def opened(watch: Watch, plan: Plan, model: Subject, *, take: Turn | None, over: OverHttp | None) -> Turn:
    """The control and a wake before each run; where two sessions take turns, with `take`, when it is this one's."""
    around = looked_at(over, plan)

    @contextlib.contextmanager
    def turn(arm: str, number: int | None) -> Iterator[None]:
        with take(arm, number) if take else contextlib.nullcontext():
            _open(watch, plan, model, arm, is_sample=number is not None)
        with around(arm, number):
            yield

    return turn


def _open(watch: Watch, plan: Plan, model: Subject, arm: str, *, is_sample: bool) -> None:
    """Run the control, then wake caches and threads that it left cold with a short request that no sample uses."""
    watch.turn(is_sample=is_sample)
    prompt = _WAKING.prompt(model.vocab_size, plan.name, "wake")
    for _ in model.stream(prompt, _WAKING.new_tokens, **plan.arms[arm]):
        pass
