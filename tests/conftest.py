"""What every test begins without: the secrets of URIs that others have met in this process."""

from __future__ import annotations

import pytest
from longscan.pipeline import storage


@pytest.fixture(autouse=True)
def no_secrets_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_secrets", set())
