"""Every error that nanoserve raises on purpose, in one tree.

    NanoserveError
    ├── ConfigError       an option, a device, a dtype or a model shape that cannot work
    │   └── KernelError   compiled kernels that this machine cannot make or run
    ├── ModelError        a model that cannot be found or read
    │   ├── FetchError    the package index, the hub or the disk did not deliver
    │   └── WeightsError  a checkpoint that is truncated, foreign or incomplete
    ├── RequestError      a prompt or sampling setting that this engine cannot run
    ├── ApiError          a call that the server does not answer, or not to its end
    └── BlockError        KV blocks that are not what their user takes them for
        └── OutOfBlocksError  fewer are free than are wanted, for now

Each message is one line that names the offending value and the choices. Anything else that escapes is a bug.
This module knows no other module.
"""

from collections.abc import Iterable


class NanoserveError(Exception):
    """Root of the tree; the command line prints it without a traceback and exits with status 2."""


class ConfigError(NanoserveError):
    """An option, device, dtype or model shape that cannot work."""


class KernelError(ConfigError):
    """Compiled kernels that this machine cannot make or run; without them plain torch computes the same."""


class ModelError(NanoserveError):
    """A model that cannot be found or read."""


class FetchError(ModelError):
    """A model that could not be brought to this machine: index out of reach, wrong hash, no disk space."""


class WeightsError(ModelError):
    """A checkpoint that is truncated, foreign or incomplete; the message names the file."""


class RequestError(NanoserveError):
    """A prompt or sampling setting that this engine cannot run; raised before any work is done."""


class ApiError(NanoserveError):
    """A call that the server does not answer, or not to its end, and the HTTP status that says so.

    `param` is the field at fault, `code` a word for programs, both as OpenAI's; `retry_after_s` 0 promises nothing.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s


class BlockError(NanoserveError):
    """A block that is freed twice, is shared while free, or is of another pool: whoever did that has lost count."""


class OutOfBlocksError(BlockError):
    """Fewer blocks are free than are wanted; nothing was taken. The scheduler makes room, or waits."""


def unknown(kind: str, value: object, choices: Iterable[str]) -> str:
    """One line for the commonest mistake: a name that is not one of the choices."""
    return f"unknown {kind} {value!r}; choose one of: {', '.join(choices)}"


def one_line(error: Exception) -> str:
    """The message of somebody else's exception, without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
