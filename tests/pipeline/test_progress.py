"""How far a run is: numbers that add up when shards end, when a run goes on, and when estimates were wrong."""

from __future__ import annotations

import io
import logging
from dataclasses import replace

import pytest
from longscan.pipeline.progress import Progress
from longscan.pipeline.shards import Carried, ShardReport
from longscan.pipeline.wording import clock_time, count, num_bytes, plural


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def report(index: int, tokens: int, *, documents: int = 1, errors: int = 0) -> ShardReport:
    return ShardReport(index, documents, errors, tokens, 0, 1.0)


def at_work(estimated_tokens: int, num_shards: int, *, kept_tokens: int = 0) -> Progress:
    """Of a run whose worker is at work for ten seconds, without having come to a token."""
    clock = Clock()
    progress = Progress(estimated_tokens, num_shards, kept_tokens=kept_tokens, stream=io.StringIO(), clock=clock)
    progress.add_tokens(0, 0)
    clock.now += 10
    return progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_line_before_during_and_after() -> None:
    progress = at_work(1000, 2)
    assert progress.line() == "0 of about 1.0 k tokens, 0 %, 0 tokens/s; 0 of 2 shards, 0 documents, 0 errors"
    progress.add_tokens(250, 250)
    assert progress.line().startswith("250 of about 1.0 k tokens, 25 %, 25 tokens/s, 0:30 left; 0 of 2 shards")
    progress.add_shard(report(0, 400, documents=3, errors=1), 500)
    assert progress.line() == "400 of about 800 tokens, 50 %, 40 tokens/s, 0:10 left; 1 of 2 shards, 3 documents, 1 error"
    progress.add_shard(report(1, 600), 500)
    assert progress.line() == "1.0 k tokens in 0:10, 100 tokens/s; 2 of 2 shards, 4 documents, 1 error"


def test_until_a_shard_is_done_the_estimate_follows_what_went_through() -> None:
    """A run of one giant's shard: how many bytes its tokens take is known long before the shard is done."""
    progress = at_work(1000, 2)
    progress.add_tokens(300, 200)
    assert progress.line().startswith("300 of about 1.5 k tokens, 20 %, 30 tokens/s, 0:40 left; 0 of 2 shards")
    progress.set_tokens(600, 300)
    assert progress.line().startswith("600 of about 2.0 k tokens, 30 %, 60 tokens/s, 0:23 left; 0 of 2 shards")
    progress.add_shard(report(0, 750), 500)
    assert progress.line().startswith("750 of about 1.5 k tokens, 50 %, 75 tokens/s, 0:10 left; 1 of 2 shards")


def test_more_tokens_than_estimated_are_no_hundred_percent_and_no_time_left_of_zero() -> None:
    clock = Clock()
    progress = Progress(100, 1, stream=io.StringIO(), clock=clock)
    clock.now += 1
    progress.add_tokens(150, 150)
    assert progress.line().startswith("150 of about 150 tokens, 99 %, 150 tokens/s; ")


def test_the_start_of_the_workers_is_in_the_time_of_a_run_that_ended_and_in_no_speed_before() -> None:
    clock = Clock()
    progress = Progress(1000, 1, stream=io.StringIO(), clock=clock)
    clock.now += 80
    progress.add_tokens(60, 60)
    clock.now += 0.5  # the rest of the same step
    progress.add_tokens(40, 40)
    assert progress.line().startswith("100 of about 1.0 k tokens, 10 %, 1 tokens/s; ")
    clock.now += 10
    progress.add_tokens(100, 100)
    assert progress.line().startswith("200 of about 1.0 k tokens, 20 %, 10 tokens/s, 1:20 left; ")
    clock.now += 9.5
    progress.add_tokens(800, 800)
    progress.add_shard(report(0, 1000), 1000)
    assert progress.line().startswith("1.0 k tokens in 1:40, 10 tokens/s; ")


def test_what_earlier_starts_have_kept_is_there_from_the_beginning_and_in_no_speed() -> None:
    progress = at_work(1000, 2, kept_tokens=300)
    assert progress.line().startswith("300 of about 1.0 k tokens, 30 %, 0 tokens/s; ")
    progress.add_tokens(200, 200)
    assert progress.line().startswith("500 of about 1.0 k tokens, 50 %, 20 tokens/s, 0:25 left; ")
    progress.add_shard(report(0, 500), 500)
    progress.add_tokens(500, 500)
    progress.add_shard(report(1, 500), 500)
    assert progress.line().startswith("700 tokens in 0:10 beside 300 kept, 70 tokens/s; 2 of 2 shards")


def test_what_an_earlier_run_has_computed_is_in_no_speed() -> None:
    """Of documents that go on from its states; they are in the time that is left, as those to come may go on so too."""
    progress = at_work(1000, 2)
    progress.add_tokens(100, 100)
    progress.add_shard(replace(report(0, 500), carried=Carried(continued_tokens=400)), 500)
    assert progress.line().startswith("500 of about 1.0 k tokens, 50 %, 10 tokens/s, 0:10 left; ")
    progress.add_tokens(50, 50)
    progress.add_shard(replace(report(1, 500), carried=Carried(continued_tokens=450)), 500)
    assert progress.line().startswith("150 tokens in 0:10 beside 850 kept, 15 tokens/s; 2 of 2 shards")


def test_tokens_that_are_counted_elsewhere_never_go_back() -> None:
    progress = Progress(100, 1, stream=io.StringIO())
    progress.set_tokens(70, 70)
    progress.set_tokens(20, 20)
    assert progress.line().startswith("70 of about 100 tokens, 70 %")


def test_a_terminal_gets_a_line_that_moves() -> None:
    stream = Terminal()
    with Progress(100, 1, stream=stream, every_s=0.01) as progress:
        progress.add_tokens(10, 10)
        while stream.getvalue().count("\r") < 3:
            pass
    assert "\r\x1b[K10 of about 100 tokens" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


def test_a_plain_log_gets_lines(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "longscan"), Progress(100, 1, stream=stream, clock=Clock(), every_s=0.01) as progress:
        while len(caplog.messages) < 2:
            pass
        progress.add_shard(report(0, 100), 100)
    assert stream.getvalue() == ""
    assert caplog.messages[-1].startswith("100 tokens in 0:00, ")


@pytest.mark.parametrize(
    ("number", "spelled"), [(0, "0"), (999, "999"), (1234, "1.2 k"), (2_500_000, "2.5 M"), (3e9, "3.0 G"), (4e12, "4.0 T")]
)
def test_count(number: float, spelled: str) -> None:
    assert count(number) == spelled


def test_bytes_and_times() -> None:
    assert [num_bytes(n) for n in (12, 1500, 1.5e6, 2e9)] == ["12 B", "1.5 kB", "1.5 MB", "2.0 GB"]
    assert [clock_time(s) for s in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]


@pytest.mark.parametrize(("number", "said"), [(0, "0 shards"), (1, "1 shard"), (2, "2 shards"), (21, "21 shards")])
def test_plurals(number: int, said: str) -> None:
    assert plural(number, "shard") == said
