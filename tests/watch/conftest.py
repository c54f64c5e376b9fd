"""Fixtures of the tests of a watch."""

from __future__ import annotations

import pytest
from command_lines import write_warm_python


@pytest.fixture
def warm_ranks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a launcher in a warm Python starts are warm as well."""
    monkeypatch.setenv("PYTHON_EXEC", write_warm_python(tmp_path_factory.mktemp("python")))
