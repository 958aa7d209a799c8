"""What a benchmark leaves on a GPU, and what is said of one for which there was not enough.

Knows bytes before and after, and the words in which libraries say that they got none. Loads neither torch nor CUDA, and
refuses to know pytest (`care.py`).
"""

import contextlib
import dataclasses
import shlex
import traceback
from collections.abc import Iterator

from benchmarks.harness.gpu.driver import Gpu

TOLERANCE_BYTES = 2 << 20
"""What may stay. At first use torch and its libraries make small things that they keep, such as a generator's state:
some kilobytes. 2 MiB is the block out of which torch's allocator serves everything small, and less than a forgotten
request's keys and values take in any model that is worth timing."""

_WORDS = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""How errors without a type of their own say it: CUDA's, cuBLAS's, and torch's on a CPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes in this process's tensors before a benchmark and after it, and the most meanwhile; None is not known."""

    before_bytes: int | None
    after_bytes: int | None
    peak_bytes: int | None

    @property
    def leak(self) -> str:
        """What stayed, in words; "" for nothing, or no more than the tolerance."""
        if self.before_bytes is None or self.after_bytes is None:
            return ""
        grown = self.after_bytes - self.before_bytes
        return f"{grown} bytes of device memory stayed behind ({self})" if grown > TOLERANCE_BYTES else ""

    def __str__(self) -> str:
        return f"{self.before_bytes} before, {self.after_bytes} after"

    def as_dict(self) -> dict[str, int | None]:
        """Ready for JSON."""
        return dataclasses.asdict(self)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, here or in what this error came of. By name: torch need not be loaded to ask."""
    return any(map(_says_so, _chain(error)))


def _says_so(error: BaseException) -> bool:
    names = {each.__name__ for each in type(error).__mro__}
    if names & {"OutOfMemoryError", "MemoryError"}:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came of, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def out_of_memory(error: BaseException, gpu: Gpu, *, arm: str, case: str) -> str:
    """What happened, where, how full the device was, and what mends it. Ask while the error's frames still live."""
    asked = next(each for each in _chain(error) if _says_so(each))
    words = str(asked).strip().partition("\n")[0].partition(". GPU ")[0] or type(asked).__name__
    where, full = f"{gpu.device}, arm {arm}" if arm else gpu.device, ", ".join(_how_full(gpu))
    return (
        f"out of memory on {where}: {words}{f' ({full})' * bool(full)}. The other cases go on; this one needs a "
        f"smaller parameter, or a smaller model: "
        f"pytest {shlex.quote(case)} --benchmark-only --dtype bfloat16 --model smollm2-135m"
    )


def _how_full(gpu: Gpu) -> Iterator[str]:
    """What can be read; a device that has just failed may refuse to say."""
    asked = {
        "in all": lambda: gpu.state().memory_total_bytes, "free": gpu.free_bytes,
        "in this process's tensors": gpu.held_bytes,
    }  # fmt: skip
    for what, read in asked.items():
        with contextlib.suppress(RuntimeError):
            amount = read()
            if amount is not None:
                yield f"{amount / 1e9:.2f} GB {what}"


def let_go(error: BaseException) -> None:
    """Let go of everything that the frames of an error hold: tensors in them would live as long as the report of it."""
    for each in list(_chain(error)):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
