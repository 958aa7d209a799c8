"""One question to NVML, which may have no answer. Knows how the library says so, and nothing of what is asked."""

import contextlib
from typing import Any


def attempt(nvml: Any, name: str, *arguments: Any) -> Any:
    """One reading; None where this driver, this GPU or this version of the library does not have it."""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        return getattr(nvml, name)(*arguments)
    return None


def text(value: Any) -> str | None:
    """Older versions of the library answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
