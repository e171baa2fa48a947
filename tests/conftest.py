"""What holds for every test: no secrets of URIs that others have met, no examples that are too slow, an end when one is asked for from
outside; and what tests of jobs begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sigterm
from fakes import tiny_checkpoint
from hypothesis import HealthCheck, settings
from longscan.pipeline.storage import redaction
from threads import torch_threads

# How long an example takes is the machine's affair; pytest's own limit ends one that hangs.
settings.register_profile("longscan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("longscan")

sigterm.listen()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> None:
    sigterm.obey(item.nodeid)


@pytest.fixture(autouse=True)
def no_secrets_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_secrets", set())


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer. It is everybody's: nothing in it is changed."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For so small a model a second one only waits for the first."""
    with torch_threads(1):
        yield
