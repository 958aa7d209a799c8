"""How a session of pytest takes its GPU, by its options, and says meanwhile what it waits for.

Knows pytest's options and its capture. Refuses to know the policy (`gpu/choice.py`), and for how long a GPU is kept.
"""

import contextlib
import sys
from collections.abc import Callable, Collection
from typing import Any

import pytest

from benchmarks.harness.gpu.choice import Chooser, Claim, Worker, asks_for_gpu, meant
from benchmarks.harness.gpu.driver import Gpu, NoGpu, driver
from benchmarks.harness.gpu.lock import GpuLocks, family_of_leader
from benchmarks.harness.sources.nanoserve import choose_device


def claim_gpu(
    config: pytest.Config, *, timed: bool, leader: int, relatives: Callable[[], Collection[int]]
) -> Claim | Gpu:
    """What `--device` means now; no claim but `NoGpu` for a CPU. Sessions with the same `leader` share a GPU.

    Where nothing is timed, the workers of xdist share what there is, without a lock: a test is as right beside others.
    Raises DeviceError or UnusableSubjectError.
    """
    asked, worker = config.getoption("--device"), Worker.of()
    gpus = driver().gpus() if asks_for_gpu(asked) else []
    if not gpus:
        return NoGpu(choose_device(asked))
    chosen = meant(asked, gpus, worker)
    if worker and not timed:
        return Claim(chosen[0], chosen[0].device)
    chooser = Chooser(
        locks=GpuLocks(),
        family=family_of_leader(leader),
        say=lambda text: _tell(config, text),
        relatives=relatives,
        wait_s=config.getoption("--gpu-wait-s"),
    )
    return chooser.claim(chosen)


def _tell(config: pytest.Config, text: str) -> None:
    """While a fixture is set up, and from a worker as well, which has no terminal of pytest's."""
    with shown(config):
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def shown(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    """What is printed inside is not captured."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    return capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()
