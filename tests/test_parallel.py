"""`ddpbench ddp --parallel`: meshes, and a run from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_lines import read_stored_run
from rank_pool import RankPool

from ddpbench.catalog.parallel import WAYS, parse_mesh

SMALL = (
    "ddp", "--workload", "transformer", "--layers", "1", "--width", "128", "--vocabulary", "64",
    "--sequence", "8", "--batch", "2", "--steps-per-round", "1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("way", "hosts", "mesh"),
    [
        ("ddp", (4,), ()),
        ("hsdp", (8,), (2, 4)),
        ("hsdp", (4, 4, 4), (3, 4)),
        ("hsdp", (2, 4), (2, 3)),
        ("fsdp+tp", (8,), (4, 2)),
        ("tp", (4,), (4,)),
    ],
)
def test_the_default_mesh_has_all_ranks(
    way: str, hosts: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    """HSDP replicates over hosts of one size; on one host, or on unequal hosts, over two halves."""
    assert WAYS[way].lay_out((), hosts) == mesh


@pytest.mark.parametrize("text", ["", "2x", "0x2", "2x2.0", "²"])
def test_a_mesh_consists_of_integers(text: str) -> None:
    with pytest.raises(ValueError, match="invalid mesh"):
        parse_mesh(text)


def test_a_step_is_measured_on_a_mesh(pool: RankPool, tmp_path: Path) -> None:
    """All arms are measured, replicas are equal after each step, and the samples of a step are
    those of two ranks with batches of their own."""
    done = pool.call(
        4, tmp_path, *SMALL, "--backend", "gloo", "--parallel", "fsdp+tp", "--rounds", "6",
        "--accumulate", "2", "--amp", "bf16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = read_stored_run(tmp_path)[1].steps
    assert (result.case.parallel, result.case.mesh) == ("fsdp+tp", (2, 2))
    assert (result.case.prefetch, result.case.reshard_after_forward) == (True, True)
    summary, replicas = result.summary, result.replicas
    assert summary is not None
    assert replicas is not None
    assert replicas.ok
    assert replicas.verified == replicas.last_step == summary.warm_up + 6
    assert summary.samples_per_second == pytest.approx(2 * 2 * 2 / summary.step.value)
    names = {part.name for part in summary.budget}
    assert {"exposed communication", "exposed all_gather", "exposed all_reduce"} <= names
    assert result.losses[0] == result.losses[1]
    assert result.losses[0] != result.losses[2]
