"""Capabilities: each combination is tried by throwaway ranks, and judged."""

from __future__ import annotations

import contextlib
import itertools
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

import msgspec
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
from ddpbench.doctor.capabilities import judge, measure, ranks
from ddpbench.doctor.capabilities.judge import (
    CRASH,
    HANG,
    OK,
    UNSUPPORTED,
    WRONG,
    Combination,
    Verdict,
)
from ddpbench.doctor.capabilities.measure import HANG_SECONDS, Trials, try_all
from ddpbench.doctor.capabilities.ranks import Request
from ddpbench.launch import placement
from ddpbench.present.writers.text import lay_out
from ddpbench.records import store
from ddpbench.runtime import control, subgroups
from ddpbench.runtime.subgroups import Subgroup

SUM = Combination("all_reduce", "tensor", "sum", "float32")
MAX8 = Combination("all_reduce", "tensor", "max", "int8")
LIST = Combination("all_gather", "list", None, "float16")
BARRIER = Combination("barrier", "tensor", None, None)
NO = Verdict(UNSUPPORTED, "RuntimeError: no")
BAD = Verdict(WRONG, "rank 1 got 2 at index 3", {"rank": 1, "index": 3})


# --- the combinations, and the verdicts on them ---------------------------------------------------


def test_every_combination_is_tried_once_the_important_ones_first() -> None:
    everything = measure.list_combinations()
    assert everything[0] == SUM
    assert len(set(everything)) == len(everything)
    forms = {(each.operation, each.form) for each in everything}
    assert forms == {(name, form) for name, each in OPERATIONS.items() for form in each.forms}
    reduced = {each.reduce_op for each in everything if each.operation == "all_reduce"}
    assert reduced == {*REDUCE_OPS}
    assert {each.dtype for each in everything if each.operation == "reduce"} == {*DTYPES}
    assert [each for each in everything if each.dtype is None] == [BARRIER]


@pytest.mark.parametrize(
    ("verdicts", "outcome", "apart"),
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
    verdicts: list[Verdict], outcome: str, apart: bool, frozen: Frozen
) -> None:
    """If only some ranks refuse, they are out of step, and no result counts. A result that is wrong
    in one rank is wrong."""
    verdict, found_apart = judge.combine_verdicts(verdicts)
    assert (verdict.outcome, found_apart) == (outcome, apart)
    assert verdict.wrong == (BAD.wrong if outcome == WRONG else {})
    frozen.text(verdict.why)


def list_rows(tried: Sequence[tuple[Combination, Verdict]]) -> list[judge.Row]:
    return [{**asdict(combination), **asdict(verdict)} for combination, verdict in tried]


def test_a_refusal_is_no_finding(frozen: Frozen) -> None:
    """Wrong results are errors, crashes and hangs are warnings. The verdicts on one operation and
    form are one finding."""
    double = replace(MAX8, dtype="float64")
    tried = [
        (SUM, Verdict(OK)),
        (LIST, NO),
        (BARRIER, Verdict(HANG, "rank 0 did not return")),
        (MAX8, BAD),
        (double, BAD),
        (replace(LIST, dtype="int8"), Verdict(CRASH, "SIGABRT")),
    ]
    frozen.findings(judge.find_bad("gloo", list_rows(tried)))
    assert judge.find_bad("gloo", list_rows(tried[:2])) == ()
    frozen.findings(judge.find_bad("gloo", list_rows([(double, BAD)] * 6)))


def test_the_table_has_a_row_for_equal_reduce_ops(frozen: Frozen) -> None:
    """Dtypes are columns, and "?" means not tried. Reasons that start alike are one line."""
    kinds = ("float32", "bfloat16")
    works = [
        (replace(SUM, dtype=kind, reduce_op=op), Verdict(OK))
        for op in ("sum", "max")
        for kind in kinds
    ]
    refused = [
        (
            replace(SUM, dtype=kind, reduce_op="avg"),
            Verdict(UNSUPPORTED, f"AVG can not have {kind}"),
        )
        for kind in kinds
    ]
    others = [
        (BARRIER, Verdict(OK)),
        (replace(LIST, dtype="float32"), Verdict(CRASH, "a rank was aborted")),
    ]
    tried = [*works, *refused, *others]
    table = judge.build_table(list_rows(tried), "what gloo can do")
    rows = [line.split() for line in lay_out(table).splitlines()]
    assert rows[0] == ["operation", "reduce", "op", "f32", "bf16"]
    assert rows[2:] == [
        ["all_reduce", "sum", "max", "ok", "ok"],
        ["avg", "–", "–"],
        ["barrier", "ok", "ok"],
        ["all_gather", "(list)", "CRASH", "?"],
    ]
    frozen.text("\n".join(table.legend))


# --- one rank's part, in a group of this process alone --------------------------------------------


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Tries these combinations here; returns the verdicts and the reports."""
    meeting = dist.FileStore(str(tmp_path / "s"), 1)
    dist.init_process_group("gloo", store=meeting, rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    monkeypatch.setattr(control, "gather_values", lambda group, own: [own])
    one_rank: Any = SimpleNamespace(
        rank=0, hosts={"a": [0]}, watchdog=SimpleNamespace(rearm=lambda: None)
    )
    subgroup = Subgroup(subgroups.divide_ranks("world", [[0]]), world, world, rank=0)

    def walk_here(wanted: Sequence[Combination]) -> tuple[list[Verdict], list[tuple[int, str]]]:
        reports: list[tuple[int, str]] = []
        request = request_trials(wanted)
        attempt = partial(ranks.try_call, request, one_rank, subgroup, torch.device("cpu"))
        walked = ranks.walk(request, one_rank, attempt, lambda *report: reports.append(report))
        return list(walked), reports

    try:
        yield walk_here
    finally:
        dist.destroy_process_group()


def test_a_call_that_does_nothing_is_wrong(
    walk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, frozen: Frozen
) -> None:
    """The output is poisoned before the call."""
    lazy = replace(OPERATIONS["all_gather"], bind=lambda case, b, group, rank: lambda: None)
    monkeypatch.setitem(OPERATIONS, "all_gather", lazy)
    verdicts, reports = walk([LIST, SUM])
    assert reports == [(0, "trying"), (0, "tried"), (1, "trying"), (1, "tried")]
    assert verdicts[0].outcome == WRONG
    place = {"rank": 0, "index": 0, "elements": 64, "got": "nan"}
    assert verdicts[0].wrong == {**place, "expected": verdicts[0].wrong["expected"]}
    frozen.text(verdicts[0].why)
    assert verdicts[1] == Verdict(OK)


def test_a_group_that_a_refusal_breaks_is_not_used_again(
    walk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is tried after each refusal. If it fails, fresh ranks try the rest."""
    verdicts = iter([NO, Verdict(OK), NO, NO])
    monkeypatch.setattr(ranks, "try_call", lambda *_: next(verdicts))
    assert walk([SUM, LIST, MAX8])[0] == [NO, NO]


# --- one set of ranks after the other, scripted ---------------------------------------------------

ABORTED = "Fatal Python error: Aborted\n"


def request_trials(wanted: Sequence[Combination], *modules: str) -> Request:
    """A request for these combinations on gloo."""
    return Request("gloo", "cpu", "torchrun", modules, wanted)


class Ranks:
    """Scripted ranks that store verdicts, write reports, and end with a code, or hang (None)."""

    def __init__(
        self,
        first: int,
        outcomes: str = "",
        reports: Sequence[str] = (),
        code: int | None = 0,
        output: str = "",
        *,
        reported: float = 0,
        ends: float = 0,
    ) -> None:
        """reported, ends: seconds from the start to the last report, and to the end."""
        self.first, self.reports, self.output, self.code = first, reports, output, code
        self.reported, self.ends = reported, ends
        names = {"o": OK, "u": UNSUPPORTED}
        stored = [msgspec.json.encode(Verdict(names[letter])) + b"\n" for letter in outcomes]
        self.stored = b"".join(stored) + b'{"outco'  # killed in the middle of a line

    def start(self, folder: Path, clock: SleptTime) -> None:
        self.clock, self.began = clock, clock.now
        folder.mkdir()
        (folder / "verdicts").write_bytes(self.stored)
        (folder / "output").write_text(self.output)
        if self.reports:
            path = folder / "reports"
            path.write_text("".join(f"{text}\n" for text in self.reports))
            os.utime(path, (self.began + self.reported,) * 2)

    def poll(self) -> int | None:
        return self.code if self.clock.now >= self.began + self.ends else None


Attempt = Callable[..., Trials]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Try three combinations with these sets of ranks, all of which are used."""
    folders = (tmp_path / str(number) for number in itertools.count())

    def attempt(*sets: Ranks, seconds: float = 100.0) -> Trials:
        left, clock = list(sets), SleptTime()

        @contextlib.contextmanager
        def start_ranks(request: Request) -> Iterator[tuple[Path, Ranks]]:
            ranks, folder = left.pop(0), next(folders)
            assert request.first == ranks.first
            ranks.start(folder, clock)
            yield folder, ranks

        def end_ranks(process: Ranks) -> int:
            process.lasted = clock.now - process.began
            return -9 if process.code is None else process.code

        monkeypatch.setattr(measure, "start_ranks", start_ranks)
        monkeypatch.setattr(measure, "end_ranks", end_ranks)
        trials = Trials(request_trials(measure.list_combinations()[:3]))
        assert {*try_all(trials, seconds, clock)} <= {None}
        assert left == []
        return trials

    return attempt


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ((["1 0 trying"], 5, ABORTED), CRASH),
        ((["1 0 trying"], 5, "a\nb\n"), CRASH),
        ((["1 0 trying", "1 1 trying", "1 0 tried"], None, ""), HANG),
    ],
    ids=["aborted", "exit code", "hang"],
)
def test_what_ends_its_ranks_twice_is_told_and_the_rest_is_tried(
    end: tuple[Any, ...], outcome: str, tried: Attempt, frozen: Frozen
) -> None:
    """Fresh ranks try a crash a second time, and a hang never again. They go on with the rest."""
    cut = Ranks(0, "o", *end)
    again = [] if outcome == HANG else [Ranks(1, "", *end)]
    before, verdict, after = tried(cut, *again, Ranks(2, "o", ["2 0 tried"])).verdicts
    assert [before, verdict.outcome, after] == [Verdict(OK), outcome, Verdict(OK)]
    frozen.verdict(verdict.why)
    if outcome == HANG:
        assert cut.lasted == pytest.approx(HANG_SECONDS, abs=0.2)


# What happens → (sets of ranks, first letters of the outcomes)
HARMLESS = {
    "a crash that does not repeat": (
        [Ranks(0, "o", ["1 0 trying"], 5, ABORTED), Ranks(1, "oo", ["2 0 tried"])],
        "ooo",
    ),
    "rank 0 waits for a slow rank": (
        [Ranks(0, "ooo", ["0 0 tried", "0 1 tried"], reported=19, ends=20)],
        "ooo",
    ),
    "ranks hang, leave or die after a verdict": (
        [
            Ranks(0, "u", ["0 0 refused x", "0 1 refused x"], None),
            Ranks(1, "u", ["1 0 refused x"], 0),
            Ranks(2, "o", ["2 0 tried"], 5, ABORTED),
        ],
        "uuo",
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_no_combination_is_at_fault(name: str, tried: Attempt) -> None:
    sets, outcomes = HARMLESS[name]
    assert "".join(verdict.outcome[0] for verdict in tried(*sets).verdicts) == outcomes


def test_trials_end_with_their_time(tried: Attempt) -> None:
    """What was running or waiting then is not judged."""
    late = Ranks(0, "o", ["1 0 trying", "1 1 trying"], None)
    trials = tried(late, seconds=3.0)
    assert late.lasted == pytest.approx(3.0, abs=0.2)
    assert trials.verdicts == [Verdict(OK)]
    assert "the 3 s for them were over" in str(trials.given_up)


def test_who_waits_for_a_rank_that_refused_does_not_hang(tried: Attempt, frozen: Frozen) -> None:
    """One rank raises, and the other never returns. The user sees an error: it is unsupported."""
    refused = Ranks(0, "", ["0 0 trying", "0 1 refused TypeError: no"], None)
    found = tried(refused, Ranks(1, "ou", ["2 0 tried"])).verdicts
    assert [verdict.outcome for verdict in found] == [UNSUPPORTED, OK, UNSUPPORTED]
    frozen.verdict(found[0].why)


def test_ranks_that_cannot_start_are_given_up(tried: Attempt, frozen: Frozen) -> None:
    trials = tried(Ranks(0, code=5, output="RuntimeError: no GPU\nranks ended"))
    assert trials.verdicts == []
    assert trials.given_up
    frozen.text(trials.given_up)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("Fatal Python error: Segmentation fault\n\n", "Fatal Python error: Segmentation fault"),
        ("terminate called\n  what():  96 vs 88.\nx\n", "what():  96 vs 88."),
        ("Traceback:\n  x\nValueError: bad\nrank 1 failed\n", "ValueError: bad"),
        ("a\n---\n", "a"),
        ("", "no message"),
    ],
)
def test_the_error_of_the_ranks_is_in_their_output(
    output: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "output").write_text(output)
    assert measure.read_error(tmp_path) == expected


def test_launcher_variables_do_not_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of torchrun, three MPIs and Slurm do not; the user's settings do."""
    dropped = [
        *("DDPBENCH_RANK", "DDPBENCH_WORLD_SIZE", "DDPBENCH_LOCAL_RANK"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME"),
        *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_UNIVERSE_SIZE", "PMIX_RANK"),
        *("PMIX_SERVER_URI41", "PRTE_LAUNCHED", "PMI_RANK", "PMI_SIZE", "PMI_FD"),
        *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDI_CONTROL_FD", "HYDRA_BOOTSTRAP"),
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_JOB_ID"),
    ]
    kept = ["OMPI_MCA_btl", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "RANKS"]
    for name in dropped + kept:
        monkeypatch.setenv(name, "1")
    environment = measure.rank_environment()
    assert not environment.keys() & set(dropped)
    assert environment.keys() >= set(kept)
    assert placement.read_placement(environment) is None


# --- real trials ----------------------------------------------------------------------------------

# An all_gather that aborts rank 1, and a broadcast that gives rank 1 another number.
PLANTED = """
import os
from dataclasses import asdict, replace

from ddpbench.catalog.operations import OPERATIONS


def bind_abort(case, buffers, group, rank):
    return os.abort if rank == 1 else all_gather.bind(case, buffers, group, rank)


def bind_wrong(case, buffers, group, rank):
    call = broadcast.bind(case, buffers, group, rank)

    def call_wrongly():
        call()
        if rank == 1:
            buffers.output[3] += 1

    return call_wrongly


all_gather, broadcast = OPERATIONS["all_gather"], OPERATIONS["broadcast"]
OPERATIONS["all_gather"] = replace(all_gather, bind=bind_abort)
OPERATIONS["broadcast"] = replace(broadcast, bind=bind_wrong)
"""


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_crash_is_found_and_nothing_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    frozen: Frozen,
) -> None:
    """In real ranks: a crash is found, and then a wrong result. Nothing is printed, and no process
    or file is left."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    # Before tempdir changes: the server of warm Pythons stays until pytest ends.
    monkeypatch.setattr(sys, "executable", write_warm_python(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wanted = [BARRIER, LIST, SUM, Combination("broadcast", "tensor", None, "float32")]
    trials = Trials(request_trials(wanted, "planted"))
    # However busy this machine is, nothing hangs.
    patient = SimpleNamespace(time=lambda: 0.0, monotonic=time.monotonic, sleep=time.sleep)
    for _ in try_all(trials, PATIENCE_SECONDS, patient):
        pass
    assert trials.given_up is None
    frozen.facts([verdict.outcome for verdict in trials.verdicts])
    wrong = trials.verdicts[3]
    frozen.facts([wrong.wrong["rank"], wrong.wrong["index"], "index 3" in wrong.why])
    assert "Aborted" in trials.verdicts[1].why
    assert capfd.readouterr() == ("", "")
    assert wait_for_left_processes(tmp_path) == []
    assert [*tmp_path.glob("ddpbench-*")] == []


@pytest.mark.thorough
def test_two_ranks_have_their_backend_tried(pool: RankPool, tmp_path: Path) -> None:
    """The examination stores a verdict for each combination, and finds nothing wrong with gloo."""
    done = pool.call(2, tmp_path, "doctor", "--only", "capabilities", "--case-time", "120")
    (folder,) = store.list_runs(tmp_path / "results")
    (found,) = store.read(folder).examinations
    # In torch 2.7, reduce_scatter of gloo always sums.
    bad = {(each.code, each.place["operation"]) for each in found.findings}
    assert bad <= {("wrong-result", "reduce_scatter")}
    assert done.returncode == (4 if bad else 0), done.stdout + done.stderr
    assert not bad or torch.__version__ < "2.9"
    assert found.unchecked == ()
    rows = found.figures["verdicts"]
    assert len(rows) == len(measure.list_combinations())
    assert all(row["why"] for row in rows if row["outcome"] == UNSUPPORTED)
    works = {(v["operation"], v["dtype"]) for v in rows if v["outcome"] == OK}
    assert works >= {(name, "float32") for name in ("all_reduce", "broadcast", "all_gather")}
    assert [table.title in done.stdout for table in found.tables] == [True]
