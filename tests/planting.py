"""How a wrong formula is swapped in, wherever a right one has a name. Which ones there are: `mutants.py`."""

import dataclasses
import sys
from collections.abc import Callable

from benchmarks.harness import metrics, timing
from benchmarks.harness.timing import RunTiming

MUTANTS: dict[str, tuple[str, Callable[[], None]]] = {}
"""By name: which test file sees it, and how it is planted."""


def mutant(name, *, seen_by):
    def register(plant):
        MUTANTS[name] = (f"tests/test_harness_{seen_by}.py", plant)
        return plant

    return register


def everywhere(function, wrong):
    """Replace a function in every module of the instrument that has it, and in the metrics' declarations."""
    for module in [module for name, module in sys.modules.items() if name.startswith("benchmarks.harness")]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, wrong)
    for name, each in metrics.METRICS.items():
        for way in ("over", "between", "across"):
            if getattr(each, way) is function:
                metrics.METRICS[name] = dataclasses.replace(each, **{way: wrong})


def of_run(name, wrong):
    """Replace a quantity of RunTiming; `wrong` gets the run and the right value."""
    right = getattr(RunTiming, name).fget
    setattr(RunTiming, name, property(lambda run: wrong(run, right(run))))


def of_stream(change):
    """Measure another stream than the one that came: `change` gets each emission."""
    right = timing.measure_stream
    everywhere(right, lambda stream, *args, **options: right(map(change, stream), *args, **options))
