"""Fixtures of the tests of a watch."""

from __future__ import annotations

import pytest
from command_lines import write_warm_python
from patience import PATIENCE_SECONDS

from ddpbench.hang.status_board import StoreClient


@pytest.fixture
def warm_ranks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a launcher in a warm Python starts are warm as well."""
    monkeypatch.setenv("PYTHON_EXEC", write_warm_python(tmp_path_factory.mktemp("python")))


@pytest.fixture
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a store take as long for an answer as a busy machine needs, in forked ranks too."""
    ask = StoreClient.request
    monkeypatch.setattr(
        StoreClient, "request", lambda client, _, function: ask(client, PATIENCE_SECONDS, function)
    )
