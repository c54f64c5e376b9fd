"""Run both fuzzers on the same cases each time."""

from __future__ import annotations

import random
from collections.abc import Callable

import fuzz_files
import fuzz_options
import pytest
from fuzz_harness import Tally


@pytest.mark.parametrize(
    ("fuzz", "cases"), [(fuzz_options.fuzz, 300), (fuzz_files.fuzz, 400)], ids=["options", "files"]
)
def test_whatever_is_given_the_end_is_an_exit_code_and_a_sentence(
    fuzz: Callable[[random.Random, int], Tally], cases: int
) -> None:
    """No command line and no damaged file leads to a traceback, a hang, another exit code, or more
    than a few lines of refusal."""
    tally = fuzz(random.Random(0), cases)
    assert tally.tried >= cases
    assert not tally.faults, "\n\n".join(map(str, tally.faults))
