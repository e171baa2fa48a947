"""Numbers as a person is told them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_TIME = re.compile(r"(?P<ns>mtime_ns:)?(?(ns)|(?:mtime|LastModified|last_modified|updated|created):)(?P<whole>\d+)(?:\.(?P<part>\d+))?")


def plural(number: int, noun: str) -> str:
    """1 shard, 2 shards: with a noun whose plural takes an s; in `noun` may stand what comes before it, as in "input file"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def count(number: float) -> str:
    """1234 -> 1.2 k"""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number:.0f}"


def num_bytes(number: float) -> str:
    """1234567 -> 1.2 MB"""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number:.0f} B"


def clock_time(seconds: float) -> str:
    """3725 -> 1:02:05"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def file_version(version: str, *, exact: bool = False) -> str:
    """mtime_ns:1796048751437325112 -> 2026-11-30 14:25:51 UTC, exactly 2026-11-30 14:25:51.437325112 UTC; others are as they are."""
    found = _TIME.fullmatch(version)
    if found is None:
        return version
    seconds, part = divmod(int(found["whole"]), 10**9) if found["ns"] else (int(found["whole"]), 0)
    try:
        date = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    except OverflowError:
        return version
    fraction = f".{part:09d}" if found["ns"] else f".{found['part'] or 0}"
    return f"{date:%Y-%m-%d %H:%M:%S}{fraction if exact else ''} UTC"
