"""Work in a process of its own, so that whoever waits for it outlives its crash and gets past its hanging.

Knows forks and pipes. Refuses to know what the work is. A fork needs a parent without a GPU and without threads that
compute: discovery imports no torch. Where nothing can be forked the work runs right here.
"""

import dataclasses
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_LAST_BREATH_S = 10.0

Say = Callable[[Any], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the work ended: with a `value`, or `why` it has none. `last_words` is what it said last, None if nothing."""

    value: Any = None
    why: str | None = None
    last_words: Any = None


def run_apart(work: Callable[[Say], Any], silence_s: float, hear: Say = lambda words: None) -> Ended:
    """Run `work(say)` in a fork of this process; what it says goes to `hear` at once. Words and value are pickled.

    It is killed when it says nothing for `silence_s`. What it raises is raised here.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return Ended(value=work(hear))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(work, theirs))
    child.start()
    theirs.close()
    try:
        return _listen(child, ours, silence_s, hear)
    finally:
        child.kill()
        child.join()
        ours.close()


def _work(work: Callable[[Say], Any], pipe: "Connection[Any, Any]") -> None:
    try:
        pipe.send(("value", work(lambda words: pipe.send(("words", words)))))
    except Exception as error:
        pipe.send(("value", _portable(error)))


def _portable(error: Exception) -> Exception:
    """The error itself, or its text where it would not survive the way through a pipe."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(traceback.format_exc())
    return error


def _listen(child: BaseProcess, pipe: "Connection[Any, Any]", silence_s: float, hear: Say) -> Ended:
    last_words, told = None, None
    while ready := wait([pipe, child.sentinel], silence_s):
        try:
            kind, told = pipe.recv() if pipe in ready else ("death", None)
        except EOFError:
            kind, told = "death", None
        if kind == "words":
            last_words = told
            hear(told)
            continue
        child.join(_LAST_BREATH_S)
        if isinstance(told, Exception):
            raise told
        why = _death_of(child) if kind == "death" else None
        return Ended(value=told, why=why, last_words=last_words)
    return Ended(why=f"nothing was heard of it for {silence_s:g} s, so it was killed", last_words=last_words)


def _death_of(child: BaseProcess) -> str:
    code = child.exitcode
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with exit status {code}"
