"""The policy: first come, first served, nothing skipped, nothing lost."""

import pytest

from nanoserve.config import SamplingParams
from nanoserve.errors import RequestError
from nanoserve.request import FinishReason, Request
from nanoserve.scheduler import Scheduler


def request(name, budget=1):
    return Request(name, (1,), SamplingParams(max_new_tokens=budget))


def names(requests):
    return [each.request_id for each in requests]


def test_runs_in_order_and_at_most_so_many():
    scheduler = Scheduler(max_running=2)
    requests = [request("a"), request("b", budget=2), request("c")]
    for each in requests:
        scheduler.add(each)
    ran = []
    while scheduler.has_work:
        scheduled = scheduler.schedule()
        ran.append(names(scheduled))
        for each in scheduled:
            each.append(5, ())
        scheduler.commit()
    assert ran == [["a", "b"], ["b", "c"]]


def test_abort_finds_waiting_and_running_requests():
    scheduler = Scheduler()
    for name in "ab":
        scheduler.add(request(name))
    scheduler.schedule()
    assert scheduler.abort("b").finish_reason is FinishReason.ABORT
    assert scheduler.abort("a").finish_reason is FinishReason.ABORT
    assert not scheduler.has_work
    with pytest.raises(RequestError, match="no request 'a'"):
        scheduler.abort("a")


def test_eos_wins_over_the_budget_unless_it_is_ignored():
    ends, ignores = request("a"), Request("b", (1,), SamplingParams(max_new_tokens=1, ignore_eos=True))
    ends.append(9, (9,))
    ignores.append(9, (9,))
    assert (ends.finish_reason, ignores.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert ends.output_ids == [9]
