"""What a backend can do: each combination really tried, by ranks to throw away."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_lines import write_warm_python
from frozen import Frozen
from left_processes import wait_for_left_processes
from patience import PATIENCE_SECONDS
from rank_pool import RankPool
from slept_time import SleptTime

from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.doctor.capabilities import judge, measure, ways
from ddpbench.doctor.capabilities.judge import (
    CRASH,
    HANG,
    OK,
    PARALLEL,
    UNSUPPORTED,
    WRONG,
    Combination,
    Verdict,
)
from ddpbench.doctor.capabilities.measure import HANG_SECONDS, Request, Trials, try_all
from ddpbench.measure import throwaway_ranks
from ddpbench.present.writers.text import lay_out
from ddpbench.records import store
from ddpbench.runtime import control, devices

SUM = Combination("all_reduce", "tensor", "sum", "float32")
MAX8 = Combination("all_reduce", "tensor", "max", "int8")
LIST = Combination("all_gather", "list", None, "float16")
BARRIER = Combination("barrier", "tensor", None, None)
NO = Verdict(UNSUPPORTED, "RuntimeError: no")
BAD = Verdict(WRONG, "rank 1 got 2 at index 3", {"rank": 1, "index": 3})


# --- what is tried --------------------------------------------------------------------------------


def test_every_combination_is_tried_once_the_important_ones_first() -> None:
    """All operations in all forms, with all reduce ops where they reduce and all dtypes where they
    move data: sums first, then ways of parallel training; of one rank nothing that needs a
    partner."""
    everything = measure.list_combinations(2)
    assert everything[0] == SUM
    assert len(set(everything)) == len(everything)
    training = [each for each in everything if each.form == PARALLEL]
    assert [each.operation for each in training] == [*ways.WAYS]
    first = everything.index(training[0])
    assert everything[first : first + len(training)] == training
    assert {each.dtype for each in everything[:first]} == {"float32", None}
    found = [each for each in everything if each not in training]
    forms = {(each.operation, each.form) for each in found}
    assert forms == {(name, form) for name, each in OPERATIONS.items() for form in each.forms}
    assert {each.reduce_op for each in found if each.operation == "all_reduce"} == {*REDUCE_OPS}
    assert {each.dtype for each in found if each.operation == "reduce"} == {*DTYPES}
    assert [each for each in found if each.dtype is None] == [BARRIER]
    alone = measure.list_combinations(1)
    assert {each.operation for each in found if each not in alone} == {"send_recv", "bidirectional"}


# --- what is made of it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("everyones", "outcome", "apart"),
    [
        ([Verdict(OK), Verdict(OK)], OK, False),
        ([NO, replace(NO, why="other")], UNSUPPORTED, False),
        ([Verdict(OK), NO], UNSUPPORTED, True),
        ([BAD, NO], UNSUPPORTED, True),
        ([Verdict(OK), BAD], WRONG, False),
    ],
    ids=["both work", "both refuse", "one refuses", "wrong and refused", "one is wrong"],
)
def test_the_ranks_agree(
    everyones: list[Verdict], outcome: str, apart: bool, frozen: Frozen
) -> None:
    """What some ranks only refuse leaves them out of step, and no result of it counts; a result
    that is wrong in one rank is wrong."""
    verdict, found_apart = judge.combine_verdicts(everyones)
    assert (verdict.outcome, found_apart) == (outcome, apart)
    assert verdict.wrong == (BAD.wrong if outcome == WRONG else {})
    frozen.text(verdict.why)


def test_a_refusal_is_no_finding(frozen: Frozen) -> None:
    """Wrong results are errors, crashes and hangs warnings, the worst first; many of one operation
    are one finding; what a backend refuses is none."""
    double = replace(MAX8, dtype="float64")
    tried = [
        (SUM, Verdict(OK)), (LIST, NO), (BARRIER, Verdict(HANG, "rank 0 did not return")),
        (MAX8, BAD), (double, BAD), (replace(LIST, dtype="int8"), Verdict(CRASH, "SIGABRT")),
    ]  # fmt: skip
    frozen.findings(judge.find_bad("gloo", tried))
    assert judge.find_bad("gloo", tried[:2]) == ()
    frozen.findings(judge.find_bad("gloo", [(double, BAD)] * 6))


def test_the_table_has_a_row_for_reduce_ops_that_are_alike(frozen: Frozen) -> None:
    """Dtypes are columns; what was not tried is a question mark; reasons stand below, one for all
    that differ in the names of dtypes and ops only."""
    kinds = ("float32", "bfloat16")
    tried = [
        *((replace(SUM, dtype=kind, reduce_op=op), Verdict(OK))
          for op in ("sum", "max") for kind in kinds),
        *((replace(SUM, dtype=kind, reduce_op="avg"), Verdict(UNSUPPORTED, f"AVG needs no {name}"))
          for kind, name in (("bfloat16", "BFloat16"), ("float32", "float"))),
        (BARRIER, Verdict(OK)),
        (replace(LIST, dtype="float32"), Verdict(CRASH, "a rank was aborted")),
    ]  # fmt: skip
    figures = {"verdicts": judge.list_rows(tried)}
    (table,) = judge.build_tables(figures, "gloo")
    rows = [line.split() for line in lay_out(table).splitlines()]
    assert table.title == "what gloo can do"
    assert rows[0] == ["operation", "reduce", "op", "f32", "bf16"]
    assert rows[2:] == [
        ["all_reduce", "sum", "max", "ok", "ok"],
        ["avg", "–", "–"],
        ["barrier", "ok", "ok"],
        ["all_gather", "(list)", "CRASH", "?"],
    ]
    frozen.text("\n".join(table.legend))
    assert judge.build_tables({}, "gloo") == ()


def test_ways_of_parallel_training_have_a_table_of_their_own() -> None:
    """A row for each way, with the reason where it does not work."""
    lacks = "RuntimeError: Cannot use ReduceOp.AVG with Gloo"
    names = [Combination(name, PARALLEL, None, None) for name in ("DDP", "HSDP")]
    outcomes = [Verdict(OK), Verdict(UNSUPPORTED, lacks)]
    figures = {"verdicts": judge.list_rows(list(zip(names, outcomes, strict=True)))}
    (table,) = judge.build_tables(figures, "gloo")
    assert table.rows == (("DDP", "ok", ""), ("HSDP", "–", lacks))


# --- one rank's part, in a group of this process alone --------------------------------------------


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Tries these combinations here; the verdicts by number, and what was reported."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    world = dist.group.WORLD
    assert world is not None
    monkeypatch.setattr(control, "gather_values", lambda group, mine: [mine])
    one_rank: Any = SimpleNamespace(
        rank=0, hosts={"a": [0]}, watchdog=SimpleNamespace(rearm=lambda: None)
    )
    ranks = ways.Ranks(one_rank, world, torch.device("cpu"), tmp_path)

    def walked(wanted: Sequence[Combination]) -> tuple[dict[int, Verdict], list[str]]:
        notes: dict[int, Verdict] = {}
        reports: list[str] = []
        measure.walk(
            request_trials(wanted),
            ranks,
            lambda kind, text: reports.append(f"{kind} {text}"),
            lambda number, verdict: notes.update({number: verdict}),
        )
        return notes, reports

    try:
        yield walked
    finally:
        dist.destroy_process_group()


def test_gloo_alone_is_never_wrong(walk: Callable[..., Any]) -> None:
    """All combinations end; each is right or refused with a reason; float32 sums work."""
    wanted = measure.list_combinations(1)
    notes, reports = walk(wanted)
    assert sorted(notes) == [*range(len(wanted))]
    assert {verdict.outcome for verdict in notes.values()} == {OK, UNSUPPORTED}
    assert all(verdict.why for verdict in notes.values() if verdict.outcome == UNSUPPORTED)
    assert notes[0] == Verdict(OK)
    assert reports[-1].split()[1] == str(len(wanted) - 1)


def test_a_call_that_does_nothing_is_wrong(
    walk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, frozen: Frozen
) -> None:
    """The output is poisoned before: what is not written is seen, with its place."""
    lazy = replace(OPERATIONS["all_gather"], bind=lambda case, b, group, rank: lambda: None)
    monkeypatch.setitem(OPERATIONS, "all_gather", lazy)
    notes, _ = walk([LIST, SUM])
    assert notes[0].outcome == WRONG
    assert notes[0].wrong == {
        "rank": 0, "index": 0, "elements": 64, "expected": notes[0].wrong["expected"], "got": "nan",
    }  # fmt: skip
    frozen.text(notes[0].why)
    assert notes[1] == Verdict(OK)


def test_a_group_that_a_refusal_breaks_is_not_used_again(
    walk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, frozen: Frozen
) -> None:
    """After a refusal something known to work is tried; when that fails too, the refused one is
    told to have broken the group, and the rest is left to fresh ranks."""
    tried = []

    def attempt(request: Any, ranks: Any, each: Combination) -> Verdict:
        tried.append(each)
        return Verdict(OK) if LIST not in tried else NO

    monkeypatch.setattr(measure, "attempt", attempt)
    notes, reports = walk([SUM, LIST, MAX8])
    assert tried == [SUM, LIST, SUM]
    assert notes[1] == NO.breaking()
    frozen.text(notes[1].why)
    assert 2 not in notes
    assert reports[-3:] == ["refused 1 RuntimeError: no", "checking 1", "checked 1"]


def test_a_lack_of_memory_is_no_refusal(
    walk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the ranks: the backend was not tried."""

    def bind(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setitem(OPERATIONS, "all_gather", replace(OPERATIONS["all_gather"], bind=bind))
    with pytest.raises(torch.OutOfMemoryError):
        walk([SUM, LIST])


# --- one set of ranks after the other, scripted ---------------------------------------------------

ABORTED = "Fatal Python error: Aborted\n"


def request_trials(wanted: Sequence[Combination], *modules: str) -> Request:
    """A request for these combinations on gloo."""
    return replace(measure.make_request("gloo", "cpu", modules), wanted=wanted)


class Set:
    """A set of ranks that notes verdicts and tells states, and ends with a code, or hangs."""

    def __init__(
        self, first: int, outcomes: str = "", states: Sequence[str] = (), code: int | None = 0,
        output: str = "", told: Sequence[float] = (0, 0), ends: float = 0,
    ) -> None:  # fmt: skip
        """told, ends: seconds from the start to the state of each rank, and to the end."""
        self.first, self.states, self.output, self.code = first, states, output, code
        self.told, self.ends = told, ends
        names = {"o": OK, "u": UNSUPPORTED}
        notes = [[first + i, asdict(Verdict(names[o]))] for i, o in enumerate(outcomes)]
        self.notes = "".join(json.dumps(note) + "\n" for note in notes)

    def start(self, folder: Path, clock: SleptTime) -> None:
        self.clock, self.began = clock, clock.now
        folder.mkdir()
        (folder / "verdicts").write_text(self.notes + '[99, {"outco')  # killed in mid-line
        (folder / "output").write_text(self.output)
        for rank, text in enumerate(self.states):
            path = folder / f"rank-{rank}"
            path.write_text(f"doing its start\n{text}\n")
            os.utime(path, (self.began + self.told[rank],) * 2)

    def poll(self) -> int | None:
        return self.code if self.clock.now >= self.began + self.ends else None

    def end(self) -> int:
        self.lasted = self.clock.now - self.began
        return -9 if self.code is None else self.code


Attempt = Callable[..., Trials]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Try three combinations with these sets of ranks, all of which are used."""
    folders = (tmp_path / str(number) for number in itertools.count())

    def attempt(*sets: Set, seconds: float = 100.0) -> Trials:
        left, clock = list(sets), SleptTime()

        @contextlib.contextmanager
        def started(module: str, request: measure.Request) -> Iterator[Any]:
            this, folder = left.pop(0), next(folders)
            assert request.first == this.first
            this.start(folder, clock)
            states = partial(throwaway_ranks.states, folder)
            yield SimpleNamespace(folder=folder, process=this, states=states, end=this.end)

        monkeypatch.setattr(throwaway_ranks, "started", started)
        trials = Trials(request_trials(measure.list_combinations(2)[:3]))
        assert {*try_all(trials, seconds, clock)} <= {None}
        assert left == []
        return trials

    return attempt


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ((["failed x", "trying 1 5"], 5, ABORTED), CRASH),
        ((["failed x", "trying 1 5"], 5, "a\nb\n"), CRASH),
        ((["tried 1", "trying 1 5"], None, ""), HANG),
    ],
    ids=["aborted", "exit code", "hang"],
)
def test_what_ends_its_ranks_twice_is_told_and_the_rest_is_tried(
    end: tuple[Any, ...], outcome: str, tried: Attempt, frozen: Frozen
) -> None:
    """A crash or a hang is confirmed by fresh ranks, which begin with the suspect; where they can
    do it, it was a bad moment."""
    twice = [Set(0, "o", *end), Set(1, "", *end), Set(2, "o", ["tried 2"])]
    before, found, after = tried(*twice).verdicts
    assert [before, found.outcome, after] == [Verdict(OK), outcome, Verdict(OK)]
    frozen.verdict(found.why)
    once = [Set(0, "o", *end), Set(1, "oo", ["tried 2"])]
    assert tried(*once).verdicts == [Verdict(OK)] * 3


@pytest.fixture
def reported(walk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What both ranks report of the last of these combinations, as if it were the first."""
    monkeypatch.setattr(measure, "attempt", lambda *_: Verdict(OK))

    def read(*wanted: Combination) -> list[str]:
        trying = [text for text in walk(wanted)[1] if text.startswith("trying")]
        return [f"trying 0 {trying[-1].split()[2]}"] * 2

    return read


@pytest.mark.parametrize("kind", ["first", "doing"])
@pytest.mark.parametrize("clock", ["host", "device"])
def test_the_first_call_on_a_device_may_take_longer(
    kind: str, clock: str, reported: Callable[..., list[str]], tried: Attempt,
    monkeypatch: pytest.MonkeyPatch, frozen: Frozen,
) -> None:  # fmt: skip
    """Two ranks take 6 s to make a communicator, and work: on a device that is no hang."""
    monkeypatch.setattr(devices.KINDS["cpu"], "clock", clock)
    slow = reported(SUM) if kind == "first" else reported(SUM, MAX8)
    if (kind, clock) == ("first", "device"):
        assert tried(Set(0, "ooo", slow, ends=6)).verdicts == [Verdict(OK)] * 3
        return
    cut = Set(0, "", slow, ends=6)
    hang = tried(cut, Set(0, "", slow, ends=6), Set(1, "oo", ["tried 2"])).verdicts[0]
    assert hang.outcome == HANG
    assert cut.lasted == pytest.approx(HANG_SECONDS, abs=0.2)
    frozen.verdict(hang.why)


def test_a_way_of_parallel_training_may_take_longer(
    reported: Callable[..., list[str]], tried: Attempt, frozen: Frozen
) -> None:
    """It is many calls: on the CPU of a busy host, 29 s are no hang, and 31 s are."""
    slow = reported(Combination("DDP", PARALLEL, None, None))
    assert tried(Set(0, "ooo", slow, ends=29)).verdicts == [Verdict(OK)] * 3
    found = tried(Set(0, "", slow, ends=31), Set(1, "oo", ["tried 2"])).verdicts
    assert found[0].outcome == HANG
    frozen.verdict(found[0].why)


def test_a_first_call_that_never_ends_is_told(tried: Attempt, frozen: Frozen) -> None:
    """After the time that it had, and not tried again: there is no time for that."""
    found = tried(Set(0, "", ["trying 0 30", "tried 0"], None), Set(1, "oo", ["tried 2"])).verdicts
    assert found[0].outcome == HANG
    frozen.verdict(found[0].why)


def test_a_rank_that_waits_for_the_last_does_not_hang(tried: Attempt) -> None:
    """Rank 0 was through long ago, and rank 1 has only just come to its end."""
    late = Set(0, "ooo", ["tried 0", "tried 0"], told=(0, 19), ends=20)
    assert tried(late).verdicts == [Verdict(OK)] * 3


def test_trials_end_with_their_time(tried: Attempt) -> None:
    """What hangs then, or waits for its turn, was not tried; nobody is blamed."""
    late = Set(0, "o", ["trying 1 5", "trying 1 5"], None)
    trials = tried(late, seconds=3.0)
    assert late.lasted == pytest.approx(3.0, abs=0.2)
    assert trials.verdicts == [Verdict(OK)]
    assert "the 3 s for it were over" in str(trials.given_up)


def test_trials_without_memory_are_given_up(tried: Attempt, frozen: Frozen) -> None:
    """That says nothing about the backend: no combination is blamed."""
    short = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB"
    trials = tried(Set(0, "o", ["trying 1 5", f"failed {short}"], 5))
    assert trials.verdicts == [Verdict(OK)]
    assert trials.given_up
    frozen.text(trials.given_up)


def test_who_waits_for_a_rank_that_refused_does_not_hang(tried: Attempt, frozen: Frozen) -> None:
    """One rank raises, the other never returns: an error is what a user sees, so that it is not
    supported, and by whom; fresh ranks go on behind it."""
    refused = Set(0, "", ["trying 0 5", "refused 0 TypeError: no"], None)
    found = tried(refused, Set(1, "ou", ["tried 2"])).verdicts
    assert [verdict.outcome for verdict in found] == [UNSUPPORTED, OK, UNSUPPORTED]
    frozen.verdict(found[0].why)


def test_a_group_that_broke_after_a_verdict_costs_no_other_its_own(tried: Attempt) -> None:
    """Ranks that leave, hang or die after they have agreed: fresh ones go on with the next, and
    what broke the group is told."""
    sets = [
        Set(0, "u", ["checking 0", "trying 0 5"], None), Set(1, "u", ["refused 1 x"], 0),
        Set(2, "o", ["tried 2"], 5, ABORTED),
    ]  # fmt: skip
    refused = Verdict(UNSUPPORTED)
    assert tried(*sets).verdicts == [refused.breaking(), refused, Verdict(OK)]


def test_ranks_that_cannot_start_are_given_up(tried: Attempt, frozen: Frozen) -> None:
    """Nothing is blamed on a combination; the reason is told."""
    trials = tried(Set(0, "", ["failed no GPU"], 5))
    assert trials.verdicts == []
    assert trials.given_up
    frozen.text(trials.given_up)


# --- real trials ----------------------------------------------------------------------------------

# An all_gather that aborts rank 1, and a step of DDP that gives rank 1 another number.
PLANTED = """
import os
from dataclasses import replace
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.doctor.capabilities import ways

honest_step = ways.WAYS["DDP"]

def train(ranks):
    parameters = honest_step(ranks)
    if ranks.group.rank() == 1:
        parameters["1.bias"][3] += 1
    return parameters

ways.WAYS["DDP"] = train

honest = OPERATIONS["all_gather"]

def bind(case, b, group, rank):
    return os.abort if rank == 1 else honest.bind(case, b, group, rank)

OPERATIONS["all_gather"] = replace(honest, bind=bind)
"""


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_crash_is_found_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    frozen: Frozen,
) -> None:  # fmt: skip
    """In real ranks: what aborts one is told to crash, and what comes after is tried, as a way of
    parallel training whose result is wrong; nothing is printed, no process and no file stays."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", write_warm_python(tmp_path))
    wanted = [BARRIER, LIST, SUM, Combination("DDP", PARALLEL, None, None)]
    trials = Trials(request_trials(wanted, "planted"))
    # However busy this machine is, nothing hangs.
    patient = SimpleNamespace(time=lambda: 0.0, monotonic=time.monotonic, sleep=time.sleep)
    for _ in try_all(trials, PATIENCE_SECONDS, patient):
        pass
    assert trials.given_up is None
    frozen.facts([verdict.outcome for verdict in trials.verdicts])
    wrong = trials.verdicts[3]
    frozen.facts([wrong.wrong["rank"], wrong.wrong["index"], "1.bias" in wrong.why])
    assert "SIGABRT" in trials.verdicts[1].why
    assert capfd.readouterr() == ("", "")
    assert wait_for_left_processes(tmp_path) == []
    assert [*tmp_path.glob("ddpbench-*")] == []


def test_no_time_is_told(frozen: Frozen) -> None:
    """Where nothing could be tried in the time there was, that is said."""
    trials = Trials(request_trials([SUM]))
    assert [*try_all(trials, 0.0)] == []
    assert trials.verdicts == []
    assert trials.given_up
    frozen.text(trials.given_up)


@pytest.mark.thorough
def test_two_ranks_have_their_backend_tried(pool: RankPool, tmp_path: Path) -> None:
    """The examination stores a verdict for each combination, and finds nothing wrong with gloo; the
    table stands in what is printed."""
    done = pool.call(2, tmp_path, "doctor", "--only", "capabilities", "--case-time", "120")
    (folder,) = store.list_runs(tmp_path / "results")
    (found,) = store.read(folder).examinations
    # In torch 2.7 gloo's reduce_scatter adds up, whatever it is asked for, also for fully_shard.
    bad = {(each.code, each.place["operation"]) for each in found.findings}
    wrong = {"reduce_scatter", "fully_shard", "sharded checkpoint"}
    assert bad <= {("wrong-result", name) for name in wrong}
    assert done.returncode == (4 if bad else 0), done.stdout + done.stderr
    assert not bad or torch.__version__ < "2.9"
    assert found.unchecked == ()
    rows = found.figures["verdicts"]
    assert len(rows) == found.figures["wanted"] == len(measure.list_combinations(2))
    works = {(v["operation"], v["dtype"]) for v in rows if v["outcome"] == OK}
    assert works >= {(name, "float32") for name in ("all_reduce", "broadcast", "all_gather")}
    assert bad or works >= {(name, None) for name in ways.WAYS}
    assert [table.title in done.stdout for table in found.tables] == [True, True]
