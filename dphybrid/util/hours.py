"""Training hours, such as `20:00-08:00` or `mon-fri 19:00-07:30, sat, sun`: when training may use the GPUs.

An item names days, hours, or both. A span whose end is before its start continues past midnight and belongs
to the day on which it starts.
"""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from dphybrid.util.errors import UserError

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_ITEM = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))?)?\s*(?:(?P<begin>\d{1,2}:\d{2})-(?P<end>\d{1,2}:\d{2}))?"
)
_HELP = "write hours as in '20:00-08:00' or 'mon-fri 19:00-07:30, sat, sun'; empty: always"
_DAY = 24 * 60  # minutes


@dataclass(frozen=True)
class _TrainingHours:
    """Spans of a week as (start, length) in minutes, the start since Monday 00:00. No spans: always open."""

    spans: tuple[tuple[int, int], ...] = ()

    def open_at(self, moment: datetime) -> bool:
        """Return whether training may use the GPUs at `moment` (local time)."""
        now = moment.weekday() * _DAY + moment.hour * 60 + moment.minute
        # Modulo a week, because a span of Sunday night continues into Monday.
        return not self.spans or any((now - begin) % (7 * _DAY) < length for begin, length in self.spans)

    def closed_reason(self, moment: datetime) -> str | None:
        """Return the reason why nothing may run at `moment`, or None if it may."""
        if self.open_at(moment):
            return None
        now = moment.weekday() * _DAY + moment.hour * 60 + moment.minute
        wait = timedelta(minutes=min((begin - now) % (7 * _DAY) for begin, _ in self.spans))
        begin = moment.replace(second=0, microsecond=0) + wait
        day = "" if begin.date() == moment.date() else f" on {begin:%Y-%m-%d}"
        return f"training hours begin at {begin:%H:%M}{day}"


def parse_training_hours(text: str) -> _TrainingHours:
    """Parse training hours. Raises UserError that names the part it could not read."""
    spans: list[tuple[int, int]] = []
    for item in filter(None, (part.strip() for part in text.lower().split(","))):
        match = _ITEM.fullmatch(item)
        days = [match["first"] or "mon", match["last"] or match["first"] or "sun"] if match else []
        if match is None or not set(days) <= set(_DAYS):
            raise UserError(f"training hours {text!r}: cannot read {item!r}; {_HELP}")
        begin, end = (_minutes(match[name] or "0:00", text) for name in ("begin", "end"))
        first, last = (_DAYS.index(day) for day in days)
        # 24 hours for 20:00-20:00 and for a day without hours (0:00-0:00).
        length = (end - begin) % _DAY or _DAY
        # % 7, because sat-mon goes past the end of the week.
        spans += [((first + offset) % 7 * _DAY + begin, length) for offset in range((last - first) % 7 + 1)]
    return _TrainingHours(tuple(spans))


def _minutes(clock: str, text: str) -> int:
    hours, minutes = (int(part) for part in clock.split(":"))
    # 24:00 is allowed, as the end of a span.
    if hours > 24 or minutes > 59 or hours * 60 + minutes > _DAY:
        raise UserError(f"training hours {text!r}: {clock} is not a time of day; {_HELP}")
    return hours * 60 + minutes
