"""A narrow part of `situations.py`, which tries them all, in real ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import situations
from command_lines import write_warm_python
from torch import nn

import ddpbench

SITUATIONS = ("a fault behind another",)
MORE = ("optimizer LBFGS", "growth", "ZeRO", "Join")


@pytest.mark.thorough
@pytest.mark.parametrize("names", [SITUATIONS, pytest.param(MORE, marks=pytest.mark.nightly)])
def test_situations_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """Healthy ones give no error; a fault is found in its tensor, rank and step, with its cause."""
    monkeypatch.setattr(sys, "executable", write_warm_python(tmp_path))
    assert situations.main(["--only", *names]) == 0


def test_a_summary_of_no_checks_claims_nothing() -> None:
    """Before the first check nothing was compared."""
    assert "equal" not in ddpbench.Verifier(nn.Linear(2, 2)).summary()
