"""A narrow part of `jobs.py`, which compares many kinds of jobs, bare and watched."""

from __future__ import annotations

import jobs
import pytest

pytestmark = pytest.mark.thorough


def test_jobs_are_the_same_with_a_watch() -> None:
    """Exit codes, stdout with all losses, and files; a FileStore leaves no file behind."""
    names = ["exception in one rank", "stdout and stderr through a tee", "init_method file://"]
    assert jobs.main(["--only", *names]) == 0
