"""`ddpbench ddp --parallel`: what is refused before any rank starts, and runs from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_lines import read_stored_run
from frozen import Frozen
from rank_pool import RankPool
from stored_steps import a_step_case

from ddpbench import cli
from ddpbench.catalog.parallel import WAYS, parse_mesh
from ddpbench.records import codec
from ddpbench.records.schema import StepCase

SMALL = (
    "ddp", "--workload", "transformer", "--layers", "1", "--width", "128", "--vocabulary", "64",
    "--sequence", "8", "--batch", "2", "--steps-per-round", "1",
)  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        "--parallel hsdp --mesh 2x3 -n 4",
        "--parallel fsdp --mesh 2x2 -n 4",
        "--parallel hsdp --mesh 2y2",
        "--mesh 4",
        "--parallel fsdp --workload convnet",
        "--parallel fsdp --bucket-cap-mb 3",
        "--parallel hsdp --comm-hook fp16",
        "--parallel tp --static-graph",
        "--parallel tp --no-prefetch",
        "--reshard-after-forward no",
        "--parallel tp -n 4 --workload transformer --width 64",
        "--parallel tp -n 3 --width 64",
    ],
)
def test_what_does_not_fit_is_refused_before_any_rank_starts(
    words: str, frozen: Frozen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One sentence, exit code 2, and no run is stored."""
    monkeypatch.chdir(tmp_path)
    given = words.split()
    given += [] if "--workload" in given else ["--workload", "mlp"]
    given += [] if "--backend" in given else ["--backend", "gloo"]
    try:
        code = cli.main(["ddp", *given])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    frozen.text(capsys.readouterr().err)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("way", "hosts", "mesh"),
    [
        ("ddp", (4,), ()),
        ("fsdp", (4, 4), (8,)),
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
    """HSDP replicates over hosts of one size; on one host, or with other hosts, over two halves."""
    assert WAYS[way].lay_out((), hosts) == mesh


@pytest.mark.parametrize("text", ["", "x", "2x", "0x2", "-1", "2x2.0", "²"])
def test_a_mesh_is_whole_numbers(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError, match="invalid mesh"):
        parse_mesh(text)


def test_a_case_that_was_stored_before_is_one_of_ddp() -> None:
    """Old runs load, as the same case that a new run of DDP has; another way is another case."""
    old = codec.parse(codec.encode(a_step_case()))
    for name in ("parallel", "mesh", "prefetch", "reshard_after_forward"):
        del old[name]
    assert codec.decode(StepCase, old) == a_step_case()
    assert a_step_case(parallel="fsdp", mesh=(2,)) != a_step_case()


def test_ranks_along_tp_share_their_batch() -> None:
    """Samples count once per batch, not once per rank."""
    meshes = {"ddp": (), "hsdp": (2, 4), "tp": (8,), "fsdp+tp": (4, 2)}
    cases = {way: a_step_case(parallel=way, mesh=m, world_size=8) for way, m in meshes.items()}
    data_ranks = {way: case.data_ranks for way, case in cases.items()}
    assert data_ranks == {"ddp": 8, "hsdp": 8, "tp": 1, "fsdp+tp": 4}


def test_a_step_is_measured_on_a_mesh(pool: RankPool, tmp_path: Path) -> None:
    """All arms of a step, and the replicas are proved equal after each step;
    the samples of a step are those of two ranks with batches of their own."""
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
