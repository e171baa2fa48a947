"""The soak in small, and its parts one by one: a node that goes, a driver that is killed with work under way, a node that comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from soak import Soak

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own

END_S = 600.0


def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + END_S
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_under_fire_ends_as_an_undisturbed_one(tmp_path: Path, seed: int) -> None:
    soak = Soak(tmp_path, shards=20, nodes=2, seed=seed, length=6000, rate=3000)
    assert soak.run(every_s=5, limit_s=900), (tmp_path / "said").read_text()
    assert soak.hits > 0


@pytest.mark.parametrize("what", ["node", "driver"])
def test_one_that_goes_in_mid_run(tmp_path: Path, what: str) -> None:
    soak = Soak(tmp_path, shards=12, nodes=2, seed=0, length=6000, rate=1500)
    with soak.cluster():
        soak.start()
        until(lambda: soak.working() and soak.evidence().computed > 1000)
        while not soak.kill(what):
            until(soak.working)
        until(lambda: soak.ended(0.2))
    soak.check()
    assert soak.evidence().again or soak.evidence().resumed, "it was killed where nothing was under way"


def test_a_node_that_comes_in_mid_run_brings_a_worker(tmp_path: Path) -> None:
    soak = Soak(tmp_path, shards=24, nodes=0, seed=0, length=6000, rate=1500)
    with soak.cluster():
        soak.start()
        until(soak.working)
        assert len(soak.working()) == 1, "there is room for one"
        soak.add_node()
        until(lambda: len(soak.working()) == 2 or soak.ended(0.1))
        assert len(soak.working()) == 2, "both are at work at once"
        until(lambda: soak.ended(0.2))
    soak.check()
