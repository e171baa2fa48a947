"""Numbers as a person is told them."""

from __future__ import annotations


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
