"""The fuzzers for a while; by hand they run for longer."""

from __future__ import annotations

import random

import fuzz_files
import fuzz_options
import pytest
from fuzz_harness import Tally

SECONDS = 12.0  # of each


@pytest.mark.parametrize("fuzzer", [fuzz_options.fuzz, fuzz_files.fuzz], ids=["options", "files"])
def test_whatever_is_given_the_end_is_an_exit_code_and_a_sentence(fuzzer: object) -> None:
    """No traceback, no hang, no other exit code, and at most a few lines where it is refused."""
    assert callable(fuzzer)
    tally: Tally = fuzzer(random.Random(0), SECONDS)
    assert tally.tried > 20
    assert not tally.faults, "\n\n".join(map(str, tally.faults))
