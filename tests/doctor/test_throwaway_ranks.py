"""Processes for code that may abort or hang: their environment, and how their end is described."""

from __future__ import annotations

import pytest

from ddpbench.doctor.capabilities import throwaway_ranks
from ddpbench.launch import placement
from ddpbench.launch.placement import Refused


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("bad\nmore"), "RuntimeError: bad"),
        (Refused("it is bad"), "it is bad"),
        (
            RuntimeError("Got an error when running the callback: ValueError: bad\nAt:\n  a.py"),
            "ValueError: bad",
        ),
    ],
    ids=["first line", "refused", "through a future"],
)
def test_an_error_is_one_sentence(error: Exception, expected: str) -> None:
    """Torch's prefix of an error in a callback is left out."""
    assert throwaway_ranks.sentence(error) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("Fatal Python error: Segmentation fault\n", "crashed (SIGSEGV)"),
        (
            "terminate called after throwing\n  what():  96 vs 88.\nFatal Python error: Aborted\n",
            "was aborted (SIGABRT): terminate called after throwing: what():  96 vs 88.",
        ),
        ("---\na\n", None),
    ],
)
def test_a_signal_is_described(output: str, expected: str | None) -> None:
    """With the message of a C++ exception before it."""
    assert throwaway_ranks.death(output.splitlines()) == expected


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
    environment = throwaway_ranks.environment()
    assert not environment.keys() & set(dropped)
    assert environment.keys() >= set(kept)
    assert placement.read_placement(environment) is None
