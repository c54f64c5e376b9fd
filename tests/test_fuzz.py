"""Run both fuzzers for some seconds."""

from __future__ import annotations

import random

import fuzz_files
import fuzz_options
import pytest
from fuzz_harness import Tally

SECONDS = 12.0  # for each fuzzer


@pytest.mark.parametrize("fuzzer", [fuzz_options.fuzz, fuzz_files.fuzz], ids=["options", "files"])
def test_whatever_is_given_the_end_is_an_exit_code_and_a_sentence(fuzzer: object) -> None:
    """No command line and no damaged file leads to a traceback, a hang, another exit code, or more
    than a few lines of refusal."""
    assert callable(fuzzer)
    tally: Tally = fuzzer(random.Random(0), SECONDS)
    assert tally.tried > 20
    assert not tally.faults, "\n\n".join(map(str, tally.faults))
