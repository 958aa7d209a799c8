"""What is paid once: compilations by `torch.compile` and Triton, captures of CUDA graphs; told apart from samples.

Knows the accounts that torch keeps of its own compiler, that Triton tells a listener of each kernel, and that a capture
has a begin and an end. Loads nothing: without torch's compiler in the process nothing was compiled. Refuses to know
what runs, and on which device.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OneTime:
    """How often something was paid that is paid once, and the seconds that it took."""

    num_compilations: int = 0
    compile_s: float = 0.0
    num_kernels: int = 0
    kernel_s: float = 0.0
    num_captures: int = 0
    capture_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.num_compilations or self.num_kernels or self.num_captures)

    def __add__(self, other: "OneTime") -> "OneTime":
        return OneTime(**{name: mine + getattr(other, name) for name, mine in self.as_dict().items()})

    def since(self, before: "OneTime") -> "OneTime":
        """What came to an account that only grows; where torch has emptied its own meanwhile, what is in it now."""
        anew = self.num_compilations < before.num_compilations
        earlier = before if not anew else dataclasses.replace(before, num_compilations=0, compile_s=0.0)
        return OneTime(**{name: max(mine - getattr(earlier, name), 0) for name, mine in self.as_dict().items()})

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        kinds = (
            (self.num_compilations, "compilation", self.compile_s),
            (self.num_kernels, "kernel compilation", self.kernel_s),
            (self.num_captures, "CUDA graph capture", self.capture_s),
        )
        told = [f"{num} {what}{'s' * (num > 1)} ({seconds:.2g} s)" for num, what, seconds in kinds if num]
        return ", ".join([*told[:-2], " and ".join(told[-2:])]) if told else "nothing"


class Captures:
    """Counts the captures of CUDA graphs while it watches the class whose instances they are."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self.num, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def watching(self, graph: Any) -> Iterator[None]:
        """Time from each `capture_begin` of the class to its `capture_end`, for as long as the block runs."""
        begin, end, begun_s = graph.capture_begin, graph.capture_end, dict[int, float]()

        def timed_begin(self_: Any, *args: Any, **options: Any) -> Any:
            begun_s[id(self_)] = self._now_s()
            return begin(self_, *args, **options)

        def timed_end(self_: Any, *args: Any, **options: Any) -> Any:
            try:
                return end(self_, *args, **options)
            finally:
                self.num += 1
                self.seconds += self._now_s() - begun_s.pop(id(self_), self._now_s())

        graph.capture_begin, graph.capture_end = timed_begin, timed_end
        try:
            yield
        finally:
            graph.capture_begin, graph.capture_end = begin, end


class Kernels:
    """Counts the kernels that Triton compiles while it listens; those that it finds on disk cost next to nothing."""

    def __init__(self) -> None:
        self.num, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def listening(self, knobs: Any) -> Iterator[None]:
        """As the listener in `triton.knobs`, for as long as the block runs; one that was there hears everything."""
        earlier = knobs.compilation.listener

        def listen(*, times: Any, cache_hit: bool, **what: Any) -> None:
            self.num += not cache_hit
            self.seconds += 0 if cache_hit else times.total / 1e6
            if earlier is not None:
                earlier(times=times, cache_hit=cache_hit, **what)

        knobs.compilation.listener = listen
        try:
            yield
        finally:
            knobs.compilation.listener = earlier


CAPTURES, KERNELS = Captures(), Kernels()
"""Of this process, as torch's own account of its compiler is."""


def spent() -> OneTime:
    """All that this process has paid so far, as far as anybody looked."""
    took_s = _compilations_s()
    return OneTime(
        num_compilations=len(took_s),
        compile_s=sum(took_s),
        num_kernels=KERNELS.num,
        kernel_s=KERNELS.seconds,
        num_captures=CAPTURES.num,
        capture_s=CAPTURES.seconds,
    )


def _compilations_s() -> Sequence[float]:
    """What each compilation of a frame took, from torch's account of it; none where its compiler was not loaded."""
    compiler = sys.modules.get("torch._dynamo.utils")
    account: Mapping[str, Sequence[float]] = getattr(compiler, "compilation_time_metrics", {})
    return account.get("_compile.compile_inner", ())


class Account:
    """Of one test: what was paid inside its timed samples, by arm, and what at any other time, which is its warm-up."""

    def __init__(self, read: Callable[[], OneTime] = spent) -> None:
        self._read, self._start = read, read()
        self.in_samples: dict[str, OneTime] = {}

    @contextlib.contextmanager
    def around(self, arm: str, sample: int | None) -> Iterator[None]:
        """Belongs around what is timed of a run, and around nothing else; `sample` is None for a warm-up."""
        if sample is None:
            yield
            return
        before = self._read()
        yield
        paid = self._read().since(before)
        if paid:
            self.in_samples[arm] = self.in_samples.get(arm, OneTime()) + paid

    def in_warm_up(self) -> OneTime:
        """Everything since the account was opened that no sample paid for."""
        return self._read().since(self._start).since(sum(self.in_samples.values(), OneTime()))


def told_together(details: Sequence[Mapping[str, Any]]) -> str:
    """What the details of some results say was paid once, in words; "" where it was nothing."""
    names = [field.name for field in dataclasses.fields(OneTime)]
    accounts = {
        "in warm-up": [each.get("warm_up", {}) for each in details],
        "inside samples": [paid for each in details for paid in each.get("one_time_in_samples", {}).values()],
    }
    sums = {
        when: sum((OneTime(**{name: each[name] for name in names if name in each}) for each in some), OneTime())
        for when, some in accounts.items()
    }
    return "; ".join(f"{paid} {when}" for when, paid in sums.items() if paid)
