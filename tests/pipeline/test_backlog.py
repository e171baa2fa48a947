"""The thread that writes carries: what has most at risk first, whatever fails, until it is given up."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from longscan.pipeline.keep.backlog import Backlog
from longscan.pipeline.storage.location import locate


def held(backlog: Backlog) -> threading.Event:
    """Its thread is at something until the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(60)

    backlog.submit(0, hold)
    assert begun.wait(60)
    return go_on


def test_what_has_most_tokens_at_risk_goes_first_and_equals_in_their_order(tmp_path: Path) -> None:
    backlog, done = Backlog(locate(str(tmp_path))), []
    go_on = held(backlog)
    for name, at_risk in (("a", 5), ("b", 7), ("c", 0), ("d", 7), ("e", 6)):
        backlog.submit(at_risk, lambda name=name: done.append(name))  # type: ignore[misc]
    assert not backlog.wait(0)
    go_on.set()
    backlog.close()
    assert done == ["b", "d", "e", "a", "c"]


def test_what_fails_is_told_of_and_the_rest_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise OSError("the disk is away")

    backlog, done = Backlog(locate(str(tmp_path))), []
    backlog.submit(1, fails)
    backlog.submit(0, lambda: done.append("after"))
    assert backlog.wait(60)
    backlog.close()
    assert done == ["after"]
    assert f"{tmp_path}: a carry cannot be written or removed: the disk is away" in caplog.text


def test_what_is_given_up_is_not_done_and_nobody_waits_for_it(tmp_path: Path) -> None:
    backlog, done = Backlog(locate(str(tmp_path))), []
    go_on = held(backlog)
    backlog.submit(9, lambda: done.append("given up"))
    backlog.give_up()
    go_on.set()
    backlog.submit(9, lambda: done.append("later"))
    backlog.close()
    assert done == []
