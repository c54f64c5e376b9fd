"""Fixtures of the tests of pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpbench.interchange import sources
from ddpbench.present.document import ReportRun
from ddpbench.present.writers import page_file

SWEEP = Path(__file__).parents[2] / "results/reference/cpu-2-ranks"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the stored sweep of gloo and mpi, with its samples: it takes seconds to make."""
    page = tmp_path_factory.mktemp("sweep") / "page.html"
    page_file.save(page, [ReportRun(SWEEP.name, sources.read(SWEEP), SWEEP)])
    return page
