"""The soak in small: a cluster of this machine's whose workers, nodes and driver are killed at random until the run is done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from soak import Soak

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_under_fire_ends_as_an_undisturbed_one(tmp_path: Path, seed: int) -> None:
    soak = Soak(tmp_path, shards=20, nodes=2, seed=seed, length=6000, rate=3000)
    assert soak.run(every_s=5, limit_s=900), (tmp_path / "said").read_text()
    assert soak.hits > 0
