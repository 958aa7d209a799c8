"""What a worker process says and hears: lines of JSON, and a stamp for each token as it comes out.

Knows lines, stamps and how a failure is told. Refuses to know any engine. The leader writes to the worker's standard
input and reads its standard output, which the worker takes for itself first: engines print.

    worker: {"ready": {"versions": {...}, ...}}
    leader: {"prompts": [[1, 2, 3], ...], "num_new_tokens": 2}
    worker: {"sent_ns": 5, "stamps_ns": [[7, 9], ...], "token_ids": [[4, 4], ...]}    or {"failed": "why"}
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import Any, Protocol, TextIO

Emit = Callable[[int, int], None]
"""Takes the place of a prompt among those asked together, and its next token, when that token is on the host."""


class Serve(Protocol):
    """Answers prompts together, greedily, past any EOS; returns when the last token is out."""

    def __call__(self, prompts: Sequence[Sequence[int]], num_new_tokens: int, emit: Emit) -> None: ...


Load = Callable[[dict[str, Any]], tuple[Serve, dict[str, Any]]]
"""Takes the settings, returns what answers and what it has to say of itself."""


class RefusalError(Exception):
    """The engine has no way to do what was asked; the message says what it lacks."""


def work(load: Load) -> None:
    """Load with the settings of the command line, then answer one line after the other until the input ends."""
    heard, told = sys.stdin, take_stdout()
    try:
        serve, about = load(json.loads(sys.argv[1]))
    except Exception as error:
        _tell(told, {"failed": in_one_line(error)})
        return
    _tell(told, {"ready": about})
    for line in heard:
        _tell(told, answer(serve, json.loads(line)))


def take_stdout() -> TextIO:
    """The standard output, for the protocol alone: whatever else is printed from now on goes to standard error."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


def answer(serve: Serve, ask: dict[str, Any]) -> dict[str, Any]:
    """Run one ask. Rubbish is collected before the clock starts, and not while it runs."""
    prompts, now_ns = ask["prompts"], time.perf_counter_ns
    stamps_ns: list[list[int]] = [[] for _ in prompts]
    token_ids: list[list[int]] = [[] for _ in prompts]

    def emit(place: int, token_id: int) -> None:
        stamps_ns[place].append(now_ns())
        token_ids[place].append(token_id)

    gc.collect()
    gc.disable()
    try:
        sent_ns = now_ns()
        serve(prompts, ask["num_new_tokens"], emit)
    except RefusalError as error:
        return {"failed": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": in_one_line(error)}
    finally:
        gc.enable()
    return {"sent_ns": sent_ns, "stamps_ns": stamps_ns, "token_ids": token_ids}


def num_shared(last: Sequence[int], prompt: Sequence[int]) -> int:
    """How many ids of a prompt are those that the last one began with; its own last id has to be run in any case."""
    pairs = zip(last, prompt[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def in_one_line(error: Exception) -> str:
    """Kind and first line: the rest is in the worker's log."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"


def _tell(told: TextIO, message: dict[str, Any]) -> None:
    told.write(json.dumps(message) + "\n")
    told.flush()
