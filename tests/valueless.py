"""A device without values: an engine runs on it, and whatever looks at a number before the end of a step is seen.

Tensors on torch's `meta` device have shapes and no numbers, so nothing can come back to the host unless a test says
what. Copies that a host would wait for, and operators that look at numbers from the host, are told by name.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoserve import sampling, staging

DEVICE = torch.device("meta")
INDEXING = ("aten.index.Tensor", "aten.index_put.", "aten.index_put_.")
COPIES = ("aten.to.", "aten._to_copy.", "aten.copy_.")
LOOKS = (
    "aten.item.", "aten._local_scalar_dense.", "aten.nonzero.", "aten.is_nonzero.", "aten.equal.",
    "aten.masked_select.", "aten.multinomial.", "aten.repeat_interleave.Tensor", "aten._unique", "aten.unique",
)  # fmt: skip


class Watch(TorchDispatchMode):
    """Writes down, by name, what the host would wait for; `num_sent` are the copies that it does not wait for."""

    def __init__(self):
        super().__init__()
        self.waits, self.num_sent, self.num_fetched, self.pinned, self.made = [], 0, 0, {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith("aten.exponential_."):  # no generator draws on this device
            return args[0]
        result = func(*args, **kwargs)
        if name.startswith(COPIES):
            self._look_at_copy(name, args, kwargs, result)
        elif name.startswith(LOOKS) or (name.startswith(INDEXING) and any(map(self._looks_first, args[1]))):
            self.waits.append(name)
        elif name.startswith("aten.detach_.") and result.device == DEVICE:
            self.waits.append("torch.tensor on the device")
        self.made |= {id(each): each for each in tree_leaves(result)}
        return result

    def _looks_first(self, index):
        """A mask has to be counted; what is not on the device is fetched, a list among it, which no operator made."""
        return index is not None and (index.dtype is torch.bool or index.device != DEVICE or id(index) not in self.made)

    def _look_at_copy(self, name, args, kwargs, result):
        source = args[1] if name.startswith("aten.copy_.") else args[0]
        if source.device == result.device:
            return
        not_waited = kwargs.get("non_blocking") or (name.startswith("aten.copy_.") and args[2:] == (True,))
        if result.device == DEVICE and not_waited and id(source) in self.pinned:
            self.num_sent += 1
        else:
            self.waits.append(f"{name}: {source.device} to {result.device}")


class HostGenerator(torch.Generator):
    """Whatever the device: it seeds, and nothing is drawn from it."""

    def __new__(cls, device):
        return super().__new__(cls, "cpu")


@contextlib.contextmanager
def watching(monkeypatch, tell):
    """A Watch over all that runs in the block; `tell(shape)` says what comes back at the end of a step."""
    watch = Watch()

    def pinned(numbers, dtype, device):
        assert device == DEVICE
        made = torch.tensor(numbers, dtype=dtype)
        watch.pinned[id(made)] = made
        return made

    def fetch(results):
        watch.num_fetched += 1
        return tell(tuple(results.shape))

    monkeypatch.setattr(torch, "Generator", HostGenerator)
    monkeypatch.setattr(staging, "on_host", pinned)
    monkeypatch.setattr(sampling, "to_host", fetch)
    with watch:
        yield watch
