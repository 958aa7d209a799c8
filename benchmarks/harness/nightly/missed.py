"""Nights that left nothing: a runner that is off is not green.

Knows times and one expectation: a night every 24 hours. Refuses to know clocks and folders.
"""

import datetime

EVERY = datetime.timedelta(hours=24)
TOLERANCE = datetime.timedelta(hours=12)
"""A night may begin so much later than the last one did, and none is missing."""

CLOCK_SKEW = datetime.timedelta(hours=1)
"""Clocks of two machines may differ so much; a night that finished later than this from now had a wrong one."""

MAX_AGE_HOURS = (EVERY + TOLERANCE) / datetime.timedelta(hours=1)


def missed_nights(last: datetime.datetime | None, now: datetime.datetime) -> list[str]:
    """The dates (UTC) without a night between the one that ended at `last` and one that begins now."""
    if last is None:
        return []
    num = int((now - last - TOLERANCE) / EVERY)
    return [(last + EVERY * (each + 1)).astimezone(datetime.UTC).date().isoformat() for each in range(num)]


def is_stale(last: datetime.datetime | None, now: datetime.datetime, max_age_hours: float) -> bool:
    """Whether there is no night that is young enough; one of the future says nothing of today."""
    return last is None or is_of_future(last, now) or now - last > datetime.timedelta(hours=max_age_hours)


def is_of_future(last: datetime.datetime, now: datetime.datetime) -> bool:
    """Whether a clock was wrong: such a night would be the newest until its time has come."""
    return last - now > CLOCK_SKEW


def age_text(last: datetime.datetime | None, now: datetime.datetime) -> str:
    """How long ago, for people."""
    if last is None:
        return "never"
    hours = (now - last) / datetime.timedelta(hours=1)
    return f"{hours:.0f} h" if hours < 72 else f"{hours / 24:.0f} d"
