"""What several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks on this host that stay for all tests."""
    ranks = Pool()
    yield ranks
    ranks.close()
