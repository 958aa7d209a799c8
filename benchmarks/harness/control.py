"""The control: a fixed piece of work that no commit can touch, run once inside every turn of a pass.

Knows numpy, torch for a GPU, and an injected clock. Refuses to know what else is measured, and what usual is (`band`).
When the control runs slower, the machine has become slower, and so has everything that was measured beside it.

Why the work looks as it does, measured on two virtual cores with a torch benchmark of 20 ms in the turns:

- A matmul on BLAS's own threads made the next sample twice as slow (41 for 21 ms): those threads spin for tens of
  milliseconds after the work. Matmuls too small for BLAS to split, on threads that sleep afterwards, cost it nothing.
- One thread sees nothing: with a busy process on each core its median went from 1.05 to 1.11 ms, because a thread that
  has slept is served first. One thread nailed to each CPU, and the slow quartile beside the median, see all of it.
- The benchmark's threads spin after their work, too. Without a pause before the control its median wandered
  between 3.9 and 5.2 ms in one quiet launch; 10 ms later it was 2.2 to 2.4.
"""

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness.timing import Clock, measure_call

SETTLE_S = 0.010
"""The pause before each control run: by then the spinning threads of whatever ran before have gone to sleep."""

_WIDTH = 48  # a product that no BLAS spreads over threads
_NUM_PRODUCTS = 240
_NUM_STREAMED = 3 << 19  # float32: 6 MiB read and 6 MiB written by each thread, more than a core's L2
_DEVICE_WIDTH = 4096
_NUM_DEVICE_PRODUCTS = 4
_NUM_DEVICE_STREAMED = 1 << 25  # float32: 128 MiB, more than any GPU's L2
_NUM_DEVICE_STREAMS = 8


class Control:
    """Runs the kernel once a turn and keeps how long each took, in seconds, in order."""

    def __init__(
        self,
        clock: Clock,
        kernel: Callable[[], object],
        settle_s: float = SETTLE_S,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._clock, self._kernel, self._settle_s, self._sleep = clock, kernel, settle_s, sleep
        self._durations_s: list[float] = []

    @property
    def durations_s(self) -> tuple[float, ...]:
        return tuple(self._durations_s)

    def turn(self) -> float:
        """Let the machine settle, run the control, return its seconds.

        Belongs before a turn's untimed warm-up: it leaves its own data in the caches.
        """
        self._sleep(self._settle_s)
        self._durations_s.append(measure_call(self._kernel, self._clock))
        return self._durations_s[-1]


class CpuKernel:
    """Small float32 matmuls and a stream through memory, on `num_threads` own threads; 2 to 4 ms on a server core.

    Each thread is nailed to one CPU of those this process may use, in turn, where the system can do that: so a busy
    process on any of them shows. Between calls the threads sleep.
    """

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 1, num_threads
        cpus = _usable_cpus()
        self._workers = []
        for index in range(num_threads):
            pool = ThreadPoolExecutor(1, "control", _nail, (cpus[index % len(cpus)] if cpus else None,))
            self._workers.append((pool, _work(index)))
        for _ in range(2):  # memory is mapped and threads exist before the first turn
            self()

    def __call__(self) -> None:
        running = [pool.submit(work) for pool, work in self._workers]
        for future in running:
            future.result()

    def close(self) -> None:
        """End the threads; the kernel cannot run afterwards."""
        for pool, _ in self._workers:
            pool.shutdown()


def _usable_cpus() -> list[int]:
    """The CPUs this process may use; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _nail(cpu: int | None) -> None:
    """Keep the calling thread, and no other, on one CPU. A system that refuses leaves it free."""
    if cpu is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {cpu})


def _work(seed: int) -> Callable[[], None]:
    """One thread's share: the same for every thread, and on memory of its own."""
    import numpy as np

    random = np.random.default_rng(seed)
    left = random.random((_NUM_PRODUCTS, _WIDTH, _WIDTH), dtype=np.float32)
    right = random.random((_WIDTH, _WIDTH), dtype=np.float32)
    products = np.empty_like(left)
    streamed = random.random(_NUM_STREAMED, dtype=np.float32)
    target = np.empty_like(streamed)

    def work() -> None:
        np.matmul(left, right, out=products)
        np.add(streamed, 1, out=target)

    return work


def device_kernel(device: str) -> Callable[[], None]:
    """The control's work on a CUDA device: half-precision matmuls and a stream through device memory.

    Half precision, because the speed of float32 follows a global switch (TF32) that a commit may flip. Takes about
    350 MiB of device memory for as long as it is kept. The clock has to wait for the device.
    """
    import torch

    left = torch.ones(_DEVICE_WIDTH, _DEVICE_WIDTH, dtype=torch.float16, device=device)
    product = torch.empty_like(left)
    streamed = torch.ones(_NUM_DEVICE_STREAMED, device=device)
    target = torch.empty_like(streamed)

    def work() -> None:
        with torch.inference_mode():
            for _ in range(_NUM_DEVICE_PRODUCTS):
                torch.mm(left, left, out=product)
            for _ in range(_NUM_DEVICE_STREAMS):
                torch.add(streamed, 1, out=target)

    for _ in range(2):
        work()
    return work
