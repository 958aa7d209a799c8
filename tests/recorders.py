"""Recorders without a GPU: a tape of operators that keeps to its addresses, one that fails, a scripted torch.cuda.

Like a captured graph the tape runs no line of Python again: what a step took from anywhere but its inputs is frozen in
it, and what it returns is the same memory each time.
"""

import contextlib
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoserve.replay import buckets


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.played = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, is_new = kwargs or {}, not func._schema.is_mutable
        before = {each.untyped_storage()._cdata for each in tensors((args, kwargs))}
        result = func(*args, **kwargs)
        made = [each for each in tensors(result) if each.untyped_storage()._cdata not in before]
        if made or not is_new:
            self.played.append((func, args, kwargs, result if is_new else ()))
        return result


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class TapeRecorder:
    """Records operators, and runs them again on the same memory."""

    sees_torch = True
    sizes = staticmethod(buckets)

    def __init__(self):
        self.num_records = self.num_replays = 0

    def record(self, run):
        run()  # as a capture does, which only then begins
        self.num_records += 1
        tape = _Tape()
        with tape:
            result = run()

        def replay():
            self.num_replays += 1
            for func, args, kwargs, made in tape.played:
                again = func(*args, **kwargs)
                for old, new in zip(tensors(made), tensors(again), strict=False):
                    old.copy_(new)
            return result

        return replay


class RerunRecorder:
    """Runs the same again, and returns the same memory each time: for kernels that no dispatcher sees."""

    sees_torch = True
    sizes = staticmethod(buckets)

    def record(self, run):
        result = run()

        def replay():
            for old, new in zip(tensors(result), tensors(run()), strict=True):
                old.copy_(new)
            return result

        return replay


class BrokenRecorder:
    sees_torch = True
    sizes = staticmethod(buckets)

    def __init__(self):
        self.num_tries = 0

    def record(self, run):
        self.num_tries += 1
        run()
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


def paged_decode_in_tensors(queries, keys, values, tables, contexts, *, block_size):
    """As `paged_decode_reference`, without a look at a number: what a tape can record."""
    num_heads, head_dim = queries.shape[1:]
    positions = torch.arange(tables.shape[1] * block_size, device=tables.device)
    sees = positions < contexts[:, None]
    slots = torch.where(sees, tables.long()[:, positions // block_size] * block_size + positions % block_size, 0)
    group = num_heads // keys.shape[0]
    keys, values = (each[:, slots].masked_fill(~sees[..., None], 0) for each in (keys, values))  # heads, requests, ...
    keys, values = (each.transpose(0, 1).repeat_interleave(group, dim=1) for each in (keys, values))
    scores = (queries[:, :, None] @ keys.transpose(-1, -2))[:, :, 0] / math.sqrt(head_dim)
    weights = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1)
    return (weights[:, :, None] @ values)[:, :, 0]


class ScriptedCuda:
    """Writes down what a recorder asks of torch.cuda."""

    def __init__(self):
        self.log = []

    def graph_pool_handle(self):
        return "pool"

    def current_stream(self):
        return ScriptedStream("main", self.log)

    def Stream(self):  # noqa: N802 - torch's name
        return ScriptedStream("side", self.log)

    def CUDAGraph(self):  # noqa: N802 - torch's name
        return self

    def replay(self):
        self.log.append("replay")

    def device(self, device):
        return self._within(f"device {device}")

    def stream(self, stream):
        return self._within(f"stream {stream.name}")

    def graph(self, graph, **how):
        return self._within(f"capture {how['pool']} on {how['stream'].name}, {how['capture_error_mode']}")

    @contextlib.contextmanager
    def _within(self, what):
        self.log.append(what)
        yield
        self.log.append(f"end {what}")


class ScriptedStream:
    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")
