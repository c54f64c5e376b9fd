"""Fixtures of the tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import Call, capture_command


@pytest.fixture
def call(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Call:
    """The command that the test module is named after, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    command = request.path.stem.removeprefix("test_")
    return lambda *words: capture_command(capsys, *words, command=command)
