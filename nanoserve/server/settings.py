"""What a server takes and refuses, validated once, when it is made.

Knows limits and addresses. Refuses to know engines, HTTP and time.
"""

import dataclasses
import math

from nanoserve.config import Options
from nanoserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Options):
    """Where to listen, and how much to take.

    `model_name` is what clients call the model. `port` 0 takes a free one. Beside the requests that the engine runs,
    `max_queued` may wait; each prompt, and each of its `n` answers, counts. `max_prompt_tokens` 0 is what the model's
    context and the pool hold. A call is given up after `request_timeout_s`, counted from its arrival to its last byte.
    A server that is asked to end answers what it has taken, for `drain_timeout_s` at most. `api_key` None asks nobody
    for one.
    """

    model_name: str = "model"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_queued: int = 256
    max_prompt_tokens: int = 0
    max_body_bytes: int = 2**20
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        checks = (
            ("model_name", bool(self.model_name) and self.model_name.isprintable(), "a name in a line"),
            ("host", bool(self.host), "an address to listen at, such as 127.0.0.1"),
            ("port", _is_count(self.port) and self.port < 2**16, "a port from 0 to 65535"),
            ("api_key", self.api_key is None or _is_word(self.api_key), "printable ASCII without spaces"),
            ("max_queued", _is_count(self.max_queued), "0 or more"),
            ("max_prompt_tokens", _is_count(self.max_prompt_tokens), "0 (as the context and the pool allow) or more"),
            ("max_body_bytes", _is_count(self.max_body_bytes) and self.max_body_bytes > 0, "at least 1"),
            ("request_timeout_s", _is_span(self.request_timeout_s), "above 0 and finite"),
            ("drain_timeout_s", self.drain_timeout_s == 0 or _is_span(self.drain_timeout_s), "0 or more, and finite"),
        )
        for name, holds, wanted in checks:
            if not holds:
                raise ConfigError(f"{name} must be {wanted}, not {getattr(self, name)!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _is_span(value: float) -> bool:
    return 0 < value < math.inf


def _is_word(text: str) -> bool:
    """What a header can carry."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
