"""Guidelines of self-consistent performance, on launches whose truth is planted."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from in_process import call_in_process
from stored_runs import a_case, a_run, launch_results

from ddpbench.analysis import lines
from ddpbench.records import store
from ddpbench.records.schema import Result
from ddpbench.render import guideline_tables
from ddpbench.verdicts import guidelines
from ddpbench.verdicts.guidelines import HOLDS, VIOLATED, Check
from ddpbench.verdicts.verdict import INCONCLUSIVE

REDUCES = {"all_reduce", "reduce", "reduce_scatter"}
ROOTED = {"broadcast", "reduce", "scatter"}


def timed(
    operation: str,
    seconds: float,
    nbytes: int = 4096,
    launches: int = 8,
    noise: float = 0.005,
    **other: Any,
) -> list[Result]:
    """Return an operation that takes about so long in each launch."""
    case = a_case(
        operation=operation, nbytes=nbytes, count=nbytes // 4,
        reduce_op="sum" if operation in REDUCES else None,
        root=0 if operation in ROOTED else None,
        **other,
    )  # fmt: skip
    seed = zlib.crc32(f"{operation}{nbytes}".encode())
    return launch_results(seconds, case, launches, noise, seed)


def checked(*results: Sequence[Result]) -> dict[tuple[str, str, int], Check]:
    """Return the checks of these results by guideline, backend and size."""
    run = a_run(*(each for group in results for each in group))
    return {
        (one.label, one.line.case.backend, one.line.case.nbytes): one
        for one in guidelines.check(lines.lines(run))
    }


@pytest.mark.parametrize(
    ("operation", "others"),
    [
        ("all_reduce", ("reduce", "broadcast")),
        ("all_reduce", ("reduce_scatter", "all_gather")),
        ("all_gather", ("all_to_all",)),
        ("broadcast", ("scatter", "all_gather")),
    ],
)
@pytest.mark.parametrize(
    ("factor", "noise", "verdict"),
    [(1.2, 0.005, VIOLATED), (0.8, 0.005, HOLDS), (1.0, 0.005, HOLDS), (1.0, 0.4, INCONCLUSIVE)],
)
def test_planted_compositions(
    operation: str, others: tuple[str, ...], factor: float, noise: float, verdict: str
) -> None:
    """An operation that takes 1.2 times as long as the others together violates the guideline, and
    the change is read as 20 %; one that takes as long, or less, does not; where launches scatter by
    40 %, nothing is claimed."""
    parts = [timed(name, 1e-3 * (i + 1), noise=noise) for i, name in enumerate(others)]
    total = sum(1e-3 * (i + 1) for i in range(len(others)))
    found = checked(timed(operation, factor * total, noise=noise), *parts)
    one = found[f"{operation} ≤ {' + '.join(others)}", "gloo", 4096]
    assert one.verdict == verdict
    assert one.shift is not None
    if verdict == VIOLATED:
        assert one.bound == pytest.approx(total, rel=0.01)
        assert one.shift.estimate == pytest.approx(math.log(1.2), abs=0.01)


def test_a_barrier_takes_no_longer_than_the_smallest_all_reduce() -> None:
    """A barrier has no dtype and no reduce op; it is compared with all_reduce of one element, and
    not with larger ones."""
    barrier = timed("barrier", 2e-3, 0, dtype="uint8")
    found = checked(barrier, timed("all_reduce", 1e-3, 4), timed("all_reduce", 3e-3, 4096))
    assert found["barrier ≤ all_reduce of 1 element", "gloo", 0].verdict == VIOLATED
    assert not checked(barrier, timed("all_reduce", 1e-3, 4096))


def test_a_smaller_message_that_takes_longer_is_found() -> None:
    """Time grows with size; where it falls, the smaller size is accused and padding proposed."""
    found = checked(
        timed("all_reduce", 2e-3, 1024), timed("all_reduce", 1e-3, 4096),
        timed("all_reduce", 1.5e-3, 16384),
    )  # fmt: skip
    label = "all_reduce ≤ the next larger size"
    assert found[label, "gloo", 1024].verdict == VIOLATED
    assert found[label, "gloo", 4096].verdict == HOLDS
    (finding,) = guideline_tables.findings(list(found.values()))
    assert finding.sentence.startswith("all_reduce of 1 KiB on gloo takes 20")
    assert "violated at 1 of 2 sizes" in finding.sentence
    assert finding.next_step == "pad these messages to 4 KiB"


def test_equal_data_are_compared() -> None:
    """Three ranks: sizes that were rounded to whole blocks match, and smaller ones, which differ by
    half, do not. Other dtypes, reduce ops, backends, roots, ranks and ways of calling never do."""
    ranks = {"world_size": 3, "ranks_per_host": (3,)}
    large, small = 2**20, 4
    found = checked(
        timed("all_gather", 1e-3, large // 12 * 12, **ranks),
        timed("broadcast", 3e-3, large, **ranks), timed("broadcast", 3e-3, small, **ranks),
        timed("scatter", 1e-3, large // 12 * 12, form="list", **ranks),
        timed("all_gather", 1e-3, 12, **ranks), timed("scatter", 1e-3, 12, **ranks),
    )  # fmt: skip
    sizes = [size for label, _, size in found if label == "broadcast ≤ scatter + all_gather"]
    assert sizes == [large]
    for other in (
        {"dtype": "float64"}, {"backend": "mpi"}, {"group": "host"}, {"async_op": True},
        {"buffers": "huge"}, {"time_definition": "events"}, {"issue": "pipelined"}, ranks,
    ):  # fmt: skip
        assert not checked(timed("all_gather", 1e-3), timed("all_to_all", 1e-3, **other))
    maximum = [
        *launch_results(1e-3, a_case(operation="reduce", reduce_op="max", root=0)),
        *timed("broadcast", 1e-3),
    ]
    assert not checked(timed("all_reduce", 5e-3), maximum)


def test_too_few_launches_and_wrong_results_decide_nothing() -> None:
    """Five launches leave a difference of ×2 open, and six are named; wrong results are not used;
    of launches that lack an operation, only the others count."""
    key = "all_gather ≤ all_to_all", "gloo", 4096
    one = checked(timed("all_gather", 2e-3, launches=5), timed("all_to_all", 1e-3, launches=5))[key]
    assert (one.verdict, one.shift, one.needed) == (INCONCLUSIVE, None, 6)
    text = guideline_tables.verdict_text(one)
    assert text == "INCONCLUSIVE: needs about 6 launches"
    one = checked(timed("all_gather", 2e-3, launches=8), timed("all_to_all", 1e-3, launches=7))[key]
    assert one.shift is not None
    assert one.shift.launches == 7


def test_one_violation_among_many_sizes_needs_more_launches() -> None:
    """With six launches, one violated size of 13 may be chance; with 12 launches it is not."""
    sizes = [4 * 4**k for k in range(13)]
    for launches, verdict in ((6, INCONCLUSIVE), (12, VIOLATED)):
        groups = []
        for nbytes in sizes:
            seconds = 2e-3 if nbytes == 4096 else 0.98e-3
            groups.append(timed("all_gather", seconds, nbytes, launches))
            groups.append(timed("all_to_all", 1e-3, nbytes, launches))
        found = checked(*groups)
        assert found["all_gather ≤ all_to_all", "gloo", 4096].verdict == verdict
        assert found["all_gather ≤ all_to_all", "gloo", 1024].verdict != VIOLATED


def test_show_prints_guidelines(tmp_path: Path) -> None:
    """`show --guidelines` adds the table, the warning and what to do, in table and markdown; it
    refuses formats for machines; without it, and in the file of the table, nothing of it is shown.
    A run with nothing to compare is told what to measure."""
    backend = {"backend": "mpi"}
    results = [
        *timed("broadcast", 5e-3, **backend), *timed("scatter", 1e-3, form="list", **backend),
        *timed("all_gather", 1e-3, in_place=False, **backend),
    ]  # fmt: skip
    store.create(tmp_path / "mine", a_run(*results), "x")
    shown = call_in_process(["show", str(tmp_path / "mine"), "--guidelines"])
    assert shown.code == 0
    assert "broadcast ≤ scatter + all_gather" in shown.out
    assert "WARNING (guideline): broadcast of 4 KiB on mpi takes " in shown.out
    assert "longer than scatter and then all_gather, which take " in shown.out
    assert "OMPI_MCA_coll_tuned_bcast_algorithm=1" in shown.out
    assert "call scatter and all_gather instead" in shown.out
    words = ["show", str(tmp_path / "mine"), "--guidelines", "--quiet", "--format"]
    markdown = call_in_process([*words, "markdown"]).out
    assert "#### guidelines" in markdown
    assert "guideline" not in call_in_process(["show", str(tmp_path / "mine")]).out
    refused = call_in_process(["show", str(tmp_path / "mine"), "--guidelines", "--format", "csv"])
    assert refused.code == 2
    assert "--format table or markdown" in refused.err
    store.create(tmp_path / "one", a_run(*timed("all_reduce", 1e-3)), "x")
    nothing = call_in_process(["show", str(tmp_path / "one"), "--guidelines"]).out
    assert nothing.endswith("--op all_reduce,reduce,broadcast\n")
