"""A training script over a mesh, watched in four real ranks: its replicas and its collectives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import run_ddpbench
from frozen import Frozen, finding_facts

from ddpbench.records import store
from ddpbench.records.schema import Run
from ddpbench.records.watched import COLUMNS

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"
RANKS = 4
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("warm_ranks")]
needs_average = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="gloo of this torch cannot average, which HSDP needs"
)


def watch(folder: Path, *words: str, code: int = 0) -> Run:
    """Watch the script in four ranks with --verify 2; return the stored run. `code`: of the job."""
    options = ("-n", str(RANKS), "--verify", "2")
    done = run_ddpbench(folder, "watch", *options, str(SCRIPT), *words)
    assert done.returncode == code, done.stderr
    assert "watch of rank" not in done.stderr, done.stderr  # a failure of the watch itself
    (path,) = store.list_runs(folder / "results")
    return store.read(path)


def about_replicas(run: Run) -> list[list[Any]]:
    """Return the facts of errors, and of what could not be compared."""
    findings = run.findings
    missing = ("nothing-to-compare", "not-compared", "replicas-not-compared")
    return [finding_facts(f) for f in findings if f.severity == "error" or f.code in missing]


def test_fully_shard_leaves_nothing_to_compare(frozen: Frozen, tmp_path: Path) -> None:
    """That is one note, neither a warning nor an error, although activation checkpoints, a saved
    state and an evaluation come between the verifications; the phases and the collectives of
    forward and backward are seen."""
    run = watch(tmp_path, "fsdp", "--steps", "60")  # of a job that is over at once, no call is seen
    frozen.facts(about_replicas(run))
    watched = run.steps[0].watched
    assert watched is not None
    seconds = dict(zip(COLUMNS, watched.median_seconds, strict=True))
    assert all(seconds[name] > 0 for name in ("forward", "backward", "optimizer", "blocked"))
    calls = Counter[str]()
    for each in watched.collectives:
        calls[each.operation] += each.calls  # type: ignore[assignment]
    # Two blocks are gathered in forward and again in backward, the rest of the model once; and
    # the gradients of all three are reduced. gloo's reduce_scatter is an all_reduce inside.
    assert calls["all_gather"] > 2
    assert calls["all_reduce"] > 1


@needs_average
def test_a_bit_of_one_shard_of_one_replica_is_found(frozen: Frozen, tmp_path: Path) -> None:
    """A bit that flips after step 3 is an error after step 5: with its tensor, its shard, the
    coordinates of the rank, the place of the element in the whole tensor, and a cause."""
    run = watch(tmp_path, "hsdp", "--flip", "3", code=4)
    frozen.facts(about_replicas(run))
    (finding,) = (each for each in run.findings if each.severity == "error")
    for words in ("step 5", "dp_replicate=1, dp_shard=1", "(rank 3)"):
        assert words in finding.sentence
    assert "[66, 3]" in finding.sentence  # row 2 of the second half of 128 rows
