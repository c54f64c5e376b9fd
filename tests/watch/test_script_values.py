"""Losses and recorded values of a watched job, from the training thread to the timeline."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from msgspec import structs
from synthetic_rounds import Job
from torch import nn

from ddpbench.records import codec
from ddpbench.records.load import Load
from ddpbench.records.watched import MOST_LATE, MOST_VALUES, Moment
from ddpbench.watch.gather.joining import join_hosts, join_ranks
from ddpbench.watch.judging.history import History
from ddpbench.watch.judging.summary import summarize
from ddpbench.watch.observe.observer import Observer
from ddpbench.watch.observe.steps import Marks
from ddpbench.watch.window import COLUMNS, Values, Window, make_window


class Training:
    """Steps of a model whose loss is the number of the backward, under an observer."""

    def __init__(self) -> None:
        self.marks, self.errors = Marks(), list[Exception]()
        self.observer = Observer(self.marks, self.errors.append)
        self.values = self.observer.values
        self._model = nn.Linear(1, 1)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)
        self._backwards = 0

    def step(self, backwards: int = 1, factor: float = 1.0) -> None:
        """Take an optimizer step; backwards: with so many losses before it."""
        for _ in range(backwards):
            loss = self._model(torch.ones(1, 1)).sum() * 0 + float(self._backwards) * factor
            loss.backward()
            self._backwards += 1
        self._optimizer.step()


@pytest.fixture
def training() -> Iterator[Training]:
    one = Training()
    yield one
    one.observer.close()
    assert one.errors == []


def test_no_secret_is_in_the_name_of_a_value(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name goes into the stored run and into metrics: it is redacted before it is shortened, so
    that no part of a secret stays."""
    secret = "hf_abcdefgh1234567890"
    monkeypatch.setenv("HF_TOKEN", secret)
    training.values.record(f"{'x' * 50} {secret}", 1.0)
    training.values.record("accuracy", 0.5)
    assert training.values.take() == {f"{'x' * 50} ***": (0, 1.0), "accuracy": (0, 0.5)}


def test_the_loss_of_one_step_is_kept_until_it_is_taken(training: Training) -> None:
    """After the first step, one loss waits with the number of its step; the next one is that of the
    first step that begins after it was taken."""
    assert training.values.take() == {}
    for _ in range(5):
        training.step()
    assert training.values.take() == {"loss": (1, 1.0)}
    assert training.values.take() == {}
    training.step()
    training.step()
    assert training.values.take() == {"loss": (6, 6.0)}


def test_the_first_loss_of_a_step_counts(training: Training) -> None:
    """Of the losses of accumulated gradients, and of several optimizers, it is always the same."""
    for first in (3.0, 9.0, 15.0):
        training.step(backwards=3)
        training.step(backwards=3)
        assert training.values.take()["loss"] == (first / 3, first)


def test_a_loss_that_is_no_finite_number_is_left_out(training: Training) -> None:
    """NaN and infinity are no points of a line, and what has more elements is no loss. The next
    loss is kept as ever."""
    for factor in (math.nan, math.inf):
        training.step()
        training.step(factor=factor)
        assert training.values.take() == {}
    training.step()
    weights = torch.ones(3, requires_grad=True)
    weights.backward(torch.ones(3))
    torch.autograd.backward([weights.sum(), weights.sum()])
    training.step()
    assert training.values.take() == {}
    training.step()
    training.step()
    assert training.values.take() == {"loss": (7, 7.0)}


def test_a_script_records_the_newest_value_of_a_name(training: Training) -> None:
    """Values come with the number of the last step; those that are not finite are left out, and so
    are names beyond a limit. A recorded loss replaces the one that is passed to backward."""
    training.values.record("accuracy", 1)
    for _ in range(4):
        training.step()
    for value in (0.25, torch.tensor(0.5), math.nan):
        training.values.record("accuracy", value)
    training.values.record("loss", 7.0)
    assert training.values.take() == {"loss": (3, 7.0), "accuracy": (3, 0.5)}
    for number in range(1000):
        training.values.record(f"value {number}", number)
    assert len(training.values.take()) == MOST_VALUES + 1


def a_window(rank: int, load: Load | None, values: Values) -> Window:
    """A window of two steps."""
    rows = np.ones((2, COLUMNS), np.float32)
    return make_window(rank, 10, rows, 10**18, load=load, values=values)


def test_load_and_values_are_joined_over_ranks_and_hosts() -> None:
    """CPU and values are medians, memory is that of the rank that has most; a rank that has read
    nothing does not count."""
    gib = 2**30
    ranks = [
        [
            a_window(0, Load(1.0, 1.0, gib), {"loss": (9, 1.0)}),
            a_window(1, Load(2.0, 2.0, gib), {}),
        ],
        [
            a_window(2, Load(9.0, 9.0, 4 * gib, 0.5, gib), {"loss": (11, 3.0), "x": (9, 5.0)}),
            a_window(3, None, {"loss": (13, 5.0)}),
        ],
    ]
    hosts = [join_ranks(windows, host) for windows, host in zip(ranks, "ab", strict=True)]
    joined = join_hosts([host for host in hosts if host is not None])
    assert joined is not None
    assert joined.load == Load(5.25, 9.0, 4 * gib, 0.5, gib)
    assert joined.values == {"loss": (10, 2.5), "x": (9, 5.0)}


def watch_values(rounds: int) -> History:
    """A job of two ranks, of which each round brings a load, a loss and ten values."""
    history = History()
    for number, round_ in enumerate(Job({"a": [0, 1]}).rounds(40 * rounds)):
        last = round_.first_step + len(round_.least_blocked) - 1
        values = {"loss": (last, 100.0 - number)}
        values |= {f"v{i}": (last, i + 1 / 3) for i in range(10)}
        load = Load(0.5 + number % 2, 2.0, 2**30)
        history.add(structs.replace(round_, load=load, values=values))
    return history


@pytest.mark.parametrize("rounds", [3, 400])
def test_moments_have_the_means_of_what_was_read_in_them(rounds: int) -> None:
    """All that was read is in some moment, in order, also where a moment covers several rounds; a
    record has a bounded number of names, and lateness of few ranks."""
    summary = summarize(watch_values(rounds))
    assert summary is not None
    moments = summary.watched.moments
    losses = [moment.loss for moment in moments if moment.loss is not None]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) >= min(rounds, 100)
    names = {name for moment in moments for name in moment.values}
    assert names == {f"v{i}" for i in range(MOST_VALUES)}
    loads = [moment.load for moment in moments if moment.load is not None]
    assert {load.most_cpu_cores for load in loads} == {2}
    assert [load.memory_nbytes for load in loads] == pytest.approx([2**30] * len(loads), rel=1e-5)
    assert np.mean([load.cpu_cores for load in loads]) == pytest.approx(1.0, abs=0.2)
    late = [rank.late_seconds for rank in summary.watched.ranks if rank.late_seconds]
    assert 0 < len(late) <= MOST_LATE
    assert {len(each) for each in late} == {len(moments)}


def test_an_old_moment_has_neither_load_nor_values() -> None:
    """Runs that were stored before these fields existed are read as ever."""
    old = {"ended": 1.0, "step": 3, "step_seconds": 0.1, "seconds": [0.1], "exposed_seconds": 0.0}
    moment = codec.decode(Moment, old)
    assert (moment.load, moment.loss, moment.values) == (None, None, {})
