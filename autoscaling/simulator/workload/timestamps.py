"""Times as traces write them, to the nanosecond; a double has no room for them."""

from __future__ import annotations

import re

_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):(\d\d))?", re.ASCII
)
_MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def timestamp_ns(text: str, *, zone_needed: bool = False) -> int | None:
    """Nanoseconds since 1970 UTC of e.g. ``2023-11-16 18:17:03.9799600`` or ``2026-06-01T05:40:20.151Z``.

    A time without a zone counts as UTC, unless ``zone_needed``. ``None``: no such time.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(match[i]) for i in range(1, 7))
    if not 1 <= month <= 12 or hour > 23 or minute > 59 or second > 60:
        return None
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if not 1 <= day <= _MONTH_DAYS[month - 1] + (leap and month == 2):
        return None
    if zone_needed and not (match[8] or match[9]):
        return None
    offset_s = (int(match[10]) * 3600 + int(match[11]) * 60) * (-1 if match[9] == "-" else 1) if match[9] else 0
    seconds = _days(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset_s
    return seconds * 1_000_000_000 + int((match[7] or "0").ljust(9, "0"))


def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 in the Gregorian calendar (Hinnant, "chrono-compatible low-level date algorithms")."""
    year -= month <= 2
    era, of_era = divmod(year, 400)
    day_of_year = (153 * (month + (9 if month <= 2 else -3)) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + day_of_year - 719_468
