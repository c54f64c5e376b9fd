"""Turns of two launches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpbench.launch import turn
from ddpbench.launch.turn import Turn


@pytest.fixture
def pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The pipes of two sides, whose turns are over at once."""
    monkeypatch.setattr(turn, "SECONDS", 0.0)
    monkeypatch.setattr(turn, "POLL_SECONDS", 0.0)
    names = str(tmp_path / "a"), str(tmp_path / "b")
    for name in names:
        os.mkfifo(name)
    kept = [os.open(name, os.O_RDWR | os.O_NONBLOCK) for name in names]
    yield names
    for each in kept:
        os.close(each)


def test_one_measures_at_a_time(pipes: tuple[str, str]) -> None:
    """A launch has the turn until it passes it on, then waits for it; the other one likewise."""
    first, second = Turn(*pipes, patience=60), Turn(*reversed(pipes), patience=60)
    for _ in range(3):
        assert first.waits()
        assert first.waits()
        second.take()
        assert second.waits()
        assert not first.waits()


@pytest.mark.parametrize("begun", [False, True])
def test_a_side_that_has_ended_is_not_waited_for(pipes: tuple[str, str], begun: bool) -> None:
    """Before or in the launch of the other one, whose later requests for a turn go nowhere; the
    process that begins that launch leaves the word for the rank that asks next."""
    ended, parent, rank = (
        Turn(*names, patience=60) for names in (pipes[::-1], pipes, pipes)
    )  # fmt: skip
    if begun:
        assert rank.waits()
    ended.end()
    if not begun:
        parent.take()
        assert rank.waits()
    for _ in range(3):
        assert not rank.waits()


def test_a_turn_that_never_comes_is_given_up(pipes: tuple[str, str]) -> None:
    """After its patience, a side measures to its end."""
    alone = Turn(*pipes, patience=0.0)
    assert alone.waits()
    for _ in range(3):
        assert not alone.waits()
