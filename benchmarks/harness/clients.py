"""Clients that wait for their answers: a closed loop, whose load follows the engine that it is put on.

Knows sizes. What a closed loop hides: an engine that stalls is asked less meanwhile, so its latencies say nothing of
clients that come when they like (`arrivals.py`).
"""

from benchmarks.harness.arrivals import Arrival
from benchmarks.harness.errors import InstrumentError


def closed_loop(num_clients: int, num_each: int, *, prompt_tokens: int, new_tokens: int) -> tuple[Arrival, ...]:
    """So many clients, each of which sends its next request at the moment in which its last one has ended."""
    for name, count in (("num_clients", num_clients), ("num_each", num_each)):
        if type(count) is not int or count < 1:
            raise InstrumentError(f"{name} must be a whole number of at least 1, not {count!r}")
    ends = [None if place < num_clients else place - num_clients for place in range(num_clients * num_each)]
    return tuple(Arrival(due_s=0.0, prompt_tokens=prompt_tokens, new_tokens=new_tokens, after=end) for end in ends)
