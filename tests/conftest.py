"""What every test begins without: the secrets of URIs that others have met in this process."""

from __future__ import annotations

import pytest
from longscan.pipeline import redaction


@pytest.fixture(autouse=True)
def no_secrets_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_secrets", set())
