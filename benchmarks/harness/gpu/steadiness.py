"""Whether a GPU stayed what it was from look to look: its clocks, its heat, its power limit, and who else was on it.

Knows a GPU's states at the turns of a case, each read when the control kernel had just run, so that none is of an idle
GPU. Refuses to know the measured numbers. What a driver does not tell is no reason for anything.
"""

from collections.abc import Iterator, Sequence

from benchmarks.harness.gpu.readings import HARMLESS_REASONS, GpuState

MAX_CLOCK_MOVE = 0.05
"""Of the SM or memory clock, which move in steps of less than 1 %; a GPU that is hot or capped loses more than 5 %."""

MAX_WARMING_C = 15
"""Degrees between the coolest and the hottest turn. Heat raises leakage, which takes from what the power limit leaves
for clocks, and a boosted clock falls by a step of 15 MHz for some five to ten degrees: over 15 degrees by 1 to 2 %, as
much as a comparison resolves. A cold GPU warms by more than that in its first minute, which is for warm-ups."""


def what_moved(turns: Sequence[GpuState], sampled: Sequence[GpuState], beside: Sequence[GpuState] = ()) -> list[str]:
    """Every reason to call what ran between these turns contaminated.

    `sampled` are those of the turns that a sample followed: a GPU that wakes up and warms up before them is no fault.
    `beside` are looks before and after, when it may be idle: of them only the power limit counts here.
    """
    return [
        *strangers(turns),
        *held_back(turns),
        *_clock_moves("SM", [each.sm_clock_mhz for each in sampled if _is_loaded(each)]),
        *_clock_moves("memory", [each.memory_clock_mhz for each in sampled if _is_loaded(each)]),
        *_warming([each.temperature_c for each in sampled if each.temperature_c is not None]),
        *_limits([each.power_limit_w for each in (*beside[:1], *turns, *beside[1:])]),
    ]


def strangers(states: Sequence[GpuState]) -> Iterator[str]:
    """Processes that are not ours, each once."""
    found = {process.pid: process for state in states for process in state.foreign_processes}
    for process in found.values():
        size = "an unknown amount" if process.memory_bytes is None else f"{process.memory_bytes / 1e9:.2f} GB"
        yield f"another process, {process.pid}, is on the GPU with {size} of memory"


def held_back(states: Sequence[GpuState]) -> Iterator[str]:
    """Reasons for a low clock that nobody chose."""
    reasons = {reason for state in states for reason in state.throttle_reasons or ()} - HARMLESS_REASONS
    if reasons:
        yield f"the GPU was held back: {', '.join(sorted(reasons))}"


def _is_loaded(state: GpuState) -> bool:
    """An idle GPU's clock says nothing of one that works."""
    return "idle" not in (state.throttle_reasons or ())


def _clock_moves(what: str, clocks_mhz: Sequence[int | None]) -> Iterator[str]:
    known = [clock for clock in clocks_mhz if clock]
    if known and min(known) < max(known) * (1 - MAX_CLOCK_MOVE):
        way = "fell" if known.index(max(known)) < known.index(min(known)) else "rose"
        first, last = (max(known), min(known)) if way == "fell" else (min(known), max(known))
        yield f"the GPU's {what} clock {way} from {first} to {last} MHz between turns"


def _warming(degrees: Sequence[int]) -> Iterator[str]:
    if degrees and max(degrees) - min(degrees) > MAX_WARMING_C:
        yield (
            f"the GPU was at {min(degrees)} to {max(degrees)} degrees Celsius from turn to turn, more than "
            f"{MAX_WARMING_C} apart"
        )


def _limits(limits_w: Sequence[float | None]) -> Iterator[str]:
    told = list(dict.fromkeys(limit for limit in limits_w if limit is not None))
    if len(told) > 1:
        yield f"the GPU's power limit was changed: {', then '.join(f'{limit:g}' for limit in told)} W"


def series(turns: Sequence[GpuState]) -> dict[str, list[float | str | None]]:
    """What was read at each turn, ready for JSON."""
    names = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")
    reasons = [None if each.throttle_reasons is None else ", ".join(each.throttle_reasons) for each in turns]
    return {name: [getattr(each, name) for each in turns] for name in names} | {"throttle_reasons": reasons}
