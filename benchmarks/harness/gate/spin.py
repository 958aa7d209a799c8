"""How long a thread that waits for work may burn its core: briefly, because the core is another process's by then.

Knows the settings of OpenMP's libraries, which read them when they are loaded. Measured on two cores with SmolLM2-135M,
turns step by step, 10 % planted into head's steps: with libgomp's own count (300,000) head looked 17.8 % slower, since
whoever comes next runs beside threads that still spin, and after head they had spun for longer; with 10,000 it looked
10.1 % slower, and an engine alone was as fast as before. At 3,000 threads fall asleep within a step, which takes a
third longer.
"""

from collections.abc import Mapping

BRIEF_SPIN: Mapping[str, str] = {
    "GOMP_SPINCOUNT": "10000",  # libgomp: turns of the loop, half a millisecond
    "KMP_BLOCKTIME": "1",  # libomp and libiomp5: milliseconds
}


def with_brief_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables, and these where nobody has set them."""
    return {**BRIEF_SPIN, **environment}
