"""What is asked of every peer, and which number is read from its answer.

A scene is what runs, a column is one number of it. Knows counts of tokens and stamps. Refuses to know engines.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.peers.process import Reply


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Requests that are sent together. With `prefix_tokens`, a second ask follows that begins like the first."""

    name: str
    prompt_tokens: int
    new_tokens: int = 1
    num_requests: int = 1
    prefix_tokens: int = 0

    @property
    def num_asks(self) -> int:
        return 2 if self.prefix_tokens else 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One number of one scene, read from the replies to its asks."""

    name: str
    title: str
    unit: str
    scene: Scene
    read: Callable[[Sequence[Reply]], float]
    is_more_better: bool = False


def ttft_ms(reply: Reply) -> float:
    """From when the worker had the prompt to when its first token was on the host."""
    return (reply.stamps_ns[0][0] - reply.sent_ns) / 1e6


def itl_ms(reply: Reply) -> float:
    """The median gap between consecutive tokens of the first request."""
    return median(later - earlier for earlier, later in itertools.pairwise(reply.stamps_ns[0])) / 1e6


def decode_tokens_per_s(reply: Reply) -> float:
    """Tokens per second from when every request has its first one, all requests together."""
    begin_ns = max(stamps[0] for stamps in reply.stamps_ns)
    after = [at_ns for stamps in reply.stamps_ns for at_ns in stamps if at_ns > begin_ns]
    return len(after) / (max(after) - begin_ns) * 1e9


def all_tokens_per_s(reply: Reply) -> float:
    """Tokens per second from when the worker had the prompts, prefill included."""
    num_tokens = sum(map(len, reply.stamps_ns))
    return num_tokens / (max(stamps[-1] for stamps in reply.stamps_ns) - reply.sent_ns) * 1e9


NEW_TOKENS = 33
"""One first token and 32 gaps."""

_ALONE = {
    length: Scene(name=f"prompt {length}", prompt_tokens=length, new_tokens=NEW_TOKENS if length in (16, 512) else 1)
    for length in (16, 64, 128, 512, 1024)
}
_BATCH = Scene(name="batch 8", prompt_tokens=64, new_tokens=32, num_requests=8)
_PREFIX = Scene(name="prefix 512+64", prompt_tokens=576, prefix_tokens=512)

COLUMNS: tuple[Column, ...] = (
    *(
        Column(name=f"ttft_{length}", title=f"TTFT, prompt {length}", unit="ms", scene=scene,
               read=lambda replies: ttft_ms(replies[0]))
        for length, scene in _ALONE.items()
    ),
    *(
        Column(name=f"itl_{length}", title=f"ITL, context {length}", unit="ms", scene=_ALONE[length],
               read=lambda replies: itl_ms(replies[0]))
        for length in (16, 512)
    ),
    Column(name="batch_8", title="decode of 8 x (64 + 32)", unit="tokens/s", scene=_BATCH,
           read=lambda replies: decode_tokens_per_s(replies[0]), is_more_better=True),
    Column(name="batch_8_all", title="all of 8 x (64 + 32)", unit="tokens/s", scene=_BATCH,
           read=lambda replies: all_tokens_per_s(replies[0]), is_more_better=True),
    Column(name="prefix_unseen", title="TTFT, 512 + 64 unseen", unit="ms", scene=_PREFIX,
           read=lambda replies: ttft_ms(replies[0])),
    Column(name="prefix_found", title="TTFT, 512 found + 64", unit="ms", scene=_PREFIX,
           read=lambda replies: ttft_ms(replies[1])),
)  # fmt: skip

MAX_TOKENS = 2048
"""Positions that a peer has to have room for; the largest scene takes 1025."""


def find_columns(names: Sequence[str]) -> list[Column]:
    """Those of the names, in the order of the table; all for no name. Raises InstrumentError for an unknown one."""
    known = [column.name for column in COLUMNS]
    for name in names:
        if name not in known:
            raise InstrumentError(f"there is no column {name!r}; choose from: {', '.join(known)}")
    return [column for column in COLUMNS if not names or column.name in names]


def scenes_of(columns: Sequence[Column]) -> list[Scene]:
    """What has to run for these columns, each scene once."""
    return list(dict.fromkeys(column.scene for column in columns))
