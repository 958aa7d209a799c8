"""Python's garbage collector, kept out of what is timed: it runs before a case, and not during one.

A collection stops everything for as long as the heap of the whole test session asks for, at moments that the
measured code did not choose. Reference counting goes on, so tensors are freed as always.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect once, then keep automatic collections off until the end of the block, whatever ends it."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
