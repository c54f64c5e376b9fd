"""Fixtures of the tests of a watch."""

from __future__ import annotations

import pytest
from patience import PATIENCE_SECONDS

from ddpbench.hang.status_board import StoreClient


@pytest.fixture
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a store take as long for an answer as a busy machine needs, in forked ranks too."""
    ask = StoreClient.request
    monkeypatch.setattr(
        StoreClient, "request", lambda client, _, function: ask(client, PATIENCE_SECONDS, function)
    )
