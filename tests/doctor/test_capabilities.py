"""Capabilities: each combination is tried by throwaway ranks, and judged."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from command_lines import write_warm_python
from frozen import Frozen
from left_processes import wait_for_left_processes
from patience import PATIENCE_SECONDS
from rank_pool import RankPool
from slept_time import SleptTime

from ddpbench.doctor.capabilities import judge, measure
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
from ddpbench.present.writers.text import lay_out
from ddpbench.records import store

SUM = Combination("all_reduce", "tensor", "sum", "float32")
MAX8 = Combination("all_reduce", "tensor", "max", "int8")
LIST = Combination("all_gather", "list", None, "float16")
BARRIER = Combination("barrier", "tensor", None, None)
OKAY = Verdict(OK)
NO = Verdict(UNSUPPORTED, "RuntimeError: no")
BAD = Verdict(WRONG, "rank 1 got 2 at index 3", {"rank": 1, "index": 3})


# --- the combinations, and the verdicts on them ---------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "outcome", "apart"),
    [
        ([Verdict(OK), Verdict(OK)], OK, False),
        ([NO, replace(NO, why="other")], UNSUPPORTED, False),
        ([BAD, NO], UNSUPPORTED, True),
        ([Verdict(OK), BAD], WRONG, False),
    ],
    ids=["both work", "both refuse", "wrong and refused", "one is wrong"],
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


def test_the_table_has_a_row_for_equal_reduce_ops(frozen: Frozen) -> None:
    """Dtypes are columns, and "?" means not tried. Reasons that start alike are one line."""
    tried = [
        (replace(SUM, dtype=kind, reduce_op=op), verdict)
        for op, why in (("sum", ""), ("max", ""), ("avg", "AVG can not have {}"))
        for kind in ("float32", "bfloat16")
        for verdict in [Verdict(UNSUPPORTED, why.format(kind)) if why else OKAY]
    ]
    tried += [(BARRIER, OKAY), (replace(LIST, dtype="float32"), Verdict(CRASH, "rank 0 aborted"))]
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


# --- one set of ranks after the other, scripted ---------------------------------------------------


def request_trials(wanted: Sequence[Combination], *modules: str) -> Request:
    """A request for these combinations on gloo."""
    return Request("gloo", "cpu", "torchrun", modules, wanted)


@dataclass
class Ranks:
    """Scripted ranks that store verdicts, write reports, and end with a code, or hang (None)."""

    first: int
    outcomes: str = ""  # first letters
    reports: Sequence[str] = ()
    code: int | None = 0
    output: str = ""
    reported: float = 0  # seconds from the start to the last report
    ends: float = 0  # and to the end
    lasted: float = 0  # until they were ended

    def start(self, folder: Path, clock: SleptTime) -> None:
        self.clock, self.began = clock, clock.now
        folder.mkdir()
        names = {"o": OK, "u": UNSUPPORTED}
        stored = [msgspec.json.encode(Verdict(names[letter])) + b"\n" for letter in self.outcomes]
        cut_off = b'{"outco'  # killed in the middle of a line
        (folder / "verdicts").write_bytes(b"".join(stored) + cut_off)
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


TRYING, LAST = ["1 0 trying", "1 1 trying"], Ranks(2, "o", ["2 0 tried"])
# What happens → (sets of ranks, first letters of the outcomes, why the first bad one)
SETS = {
    "a crash": (
        [Ranks(0, "o", TRYING, 5, "Aborted\n"), Ranks(1, "", TRYING, 5, "Aborted\n"), LAST],
        "oco",
        "its ranks ended with exit code 5: Aborted",
    ),
    "a crash that does not repeat": (
        [Ranks(0, "o", TRYING, 5, "Aborted\n"), Ranks(1, "oo", ["2 0 tried"])],
        "ooo",
        "",
    ),
    "a hang": (
        [Ranks(0, "o", [*TRYING, "1 0 tried"], None), LAST],
        "oho",
        "rank 1 did not return within 15 s",
    ),
    "rank 0 waits for a slow rank": (
        [Ranks(0, "ooo", ["0 0 tried", "0 1 tried"], reported=19, ends=20)],
        "ooo",
        "",
    ),
    "a rank waits for one that refused": (
        [Ranks(0, "o", [*TRYING, "1 1 refused TypeError: no"], None), LAST],
        "ouo",
        "in rank 1 only: TypeError: no",
    ),
    "ranks hang, leave or die after a verdict": (
        [
            Ranks(0, "u", ["0 0 refused x", "0 1 refused x"], None),
            Ranks(1, "u", ["1 0 refused x"], 0),
            Ranks(2, "o", ["2 0 tried"], 5, "Aborted\n"),
        ],
        "uuo",
        "",
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_what_ends_its_ranks_is_reported_and_the_rest_is_tried(name: str, tried: Attempt) -> None:
    """Fresh ranks try a crash a second time, and a hang never again. They go on with the rest."""
    sets, outcomes, why = SETS[name]
    verdicts = tried(*sets).verdicts
    assert "".join(verdict.outcome[0] for verdict in verdicts) == outcomes
    assert next((verdict.why for verdict in verdicts if verdict.why), "") == why
    if name == "a hang":
        assert sets[0].lasted == pytest.approx(HANG_SECONDS, abs=0.2)


def test_trials_end_with_their_time_or_without_a_start(tried: Attempt) -> None:
    """What was running or waiting then is not judged."""
    late = Ranks(0, "o", TRYING, None)
    trials = tried(late, seconds=3.0)
    assert late.lasted == pytest.approx(3.0, abs=0.2)
    assert trials.verdicts == [OKAY]
    assert "the 3 s for them were over" in str(trials.given_up)
    trials = tried(Ranks(0, code=5, output="RuntimeError: no GPU\nranks ended"))
    assert trials.verdicts == []
    assert trials.given_up == "the ranks could not start (exit code 5): RuntimeError: no GPU"


# --- real trials ----------------------------------------------------------------------------------

# An all_gather that aborts rank 1, and a broadcast that gives rank 1 another number.
PLANTED = """
import os
from dataclasses import replace

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
