"""A narrow part of `jobs.py`, which compares many kinds of jobs, bare and watched."""

from __future__ import annotations

import jobs
import pytest
from warm_python import warm_python

pytestmark = pytest.mark.thorough


NIGHTLY = pytest.param("init_method file://", marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    "kind", ["exception in one rank", "stdout and stderr through a tee", NIGHTLY]
)
def test_a_job_is_the_same_with_a_watch(kind: str) -> None:
    """Exit codes, stdout with all losses, and files; a FileStore leaves no file behind."""
    assert jobs.main(["--only", kind], warm_python()) == 0
