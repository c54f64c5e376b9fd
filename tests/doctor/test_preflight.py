"""Preflight: each difference and danger is found and named, a healthy set-up is left in peace, and
the block for an issue tells no secret."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from frozen import Frozen
from rank_pool import RankPool
from rank_setups import GIB, a_host, a_rank, a_setup
from stored_runs import a_launch, a_run

from ddpbench.analysis import findings
from ddpbench.analysis.rank_setup import Setup, folded, merge_settings
from ddpbench.doctor.preflight import checks, measure
from ddpbench.doctor.preflight.checks import Check
from ddpbench.present.writers.text import lay_out
from ddpbench.records import store
from ddpbench.records.schema import Examination, Finding
from ddpbench.records.wording import name_ranks
from ddpbench.runtime import environment, gpu_facts


def net(speed: float | None = 1.25e9, mtu: int = 1500) -> dict[str, Any]:
    """An interface over which a rank reaches other hosts."""
    used = {"name": "eth0", "mtu_nbytes": mtu, "nominal_bytes_per_second": speed}
    return {"interface": used, "addresses": ["10.0.0.1"]}


def test_a_healthy_set_up_is_left_in_peace() -> None:
    """Alike ranks on one host, on two, with GPUs; devices, cores and log files of their own, and a
    variable of one rank alone that steers nothing, are no differences. A small GPU holds the rank's
    own context."""
    assert checks.find_all(a_setup(a_rank())) == ()
    assert checks.find_all(a_setup(*[a_rank() for _ in range(8)])) == ()
    two = [a_rank(host, **net(), variables={"NCCL_ALGO": "Ring"}) for host in "aabb"]
    assert checks.find_all(a_setup(*two)) == ()
    small = a_rank(gpu_uuid="GPU-1", gpu_nbytes=6 * GIB, gpu_free_nbytes=4.5 * GIB)
    assert checks.find_all(a_setup(small)) == ()
    gpus = [
        a_rank(
            cpuset=str(n), gpu_uuid=f"GPU-{n}", gpu_name="H", gpu_numa_node=0, gpu_index=n,
            gpu_nbytes=80 * GIB, gpu_free_nbytes=79 * GIB,
            variables={"CUDA_VISIBLE_DEVICES": str(n), "NCCL_IB_HCA": f"mlx5_{n}",
                       "SLURM_PROCID": str(n), "NCCL_DEBUG_FILE": f"log.{n}"},
        )
        for n in range(4)
    ]  # fmt: skip
    assert checks.find_all(a_setup(*gpus, backend="nccl", device="cuda")) == ()


# What is wrong → (ranks, backend)
WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "library": ([a_rank(library="NCCL 2.27.3"), a_rank(), a_rank()], "nccl"),
    "driver": (
        [a_rank(h, host=a_host(driver=d)) for h, d in (("a", "550"), ("b", "550"), ("c", "535"))],
        "nccl",
    ),
    "kernel": ([a_rank("a"), a_rank("b", host=a_host(kernel="5.4"))], "gloo"),
    "smt": ([a_rank("a", host=a_host(smt=True)), a_rank("b", host=a_host(smt=False))], "gloo"),
    "variable": ([a_rank(), a_rank(), a_rank(variables={"OMP_NUM_THREADS": "4"})], "gloo"),
    "algorithm": (
        [a_rank(variables={"NCCL_ALGO": each}) for each in ("Ring", "Ring", "Tree")],
        "nccl",
    ),
    "debugging": ([a_rank(variables={"PYTHONDEVMODE": "1"})] * 2, "gloo"),
    "debug build": ([a_rank(), a_rank(debug_builds=["torch"])], "gloo"),
    "same core": ([a_rank(cpuset="2"), a_rank(cpuset="2"), a_rank(cpuset="3")], "gloo"),
    "narrow": ([a_rank(cpuset="0-3"), a_rank(cpuset="4", threads=2)], "gloo"),
    "far GPU": ([a_rank(), a_rank(gpu_numa_node=1, gpu_index=5)], "gloo"),
    "narrow slot": (
        [a_rank(), a_rank(gpu_pcie={"width": 8.0, "width_allowed": 16.0}, gpu_bus="0000:65:00.0")],
        "nccl",
    ),
    "lost data": ([a_rank(gpu_memory_errors=0), a_rank(gpu_memory_errors=2)], "nccl"),
    "NVLink down": ([a_rank(gpu_nvlinks_active=n) for n in (18, 18, 17)], "nccl"),
    "ECC": ([a_rank(gpu_ecc=on) for on in (True, True, False)], "nccl"),
    "plug-in": (
        [a_rank("a", nccl_plugins="libnccl-net.so"), a_rank("b", nccl_plugins="none")],
        "nccl",
    ),
    "TF32": ([a_rank(), a_rank(), a_rank(variables={"NVIDIA_TF32_OVERRIDE": "0"})], "nccl"),
    "file of a host": (
        [a_rank("a", nccl_conf={"/etc/nccl.conf": {"NCCL_ALGO": "Ring"}}), a_rank("b")],
        "nccl",
    ),
    "used GPU": ([a_rank(gpu_uuid="x", gpu_nbytes=80 * GIB, gpu_free_nbytes=20 * GIB)], "nccl"),
    "shared GPU": (
        [a_rank(gpu_uuid="x", gpu_nbytes=80 * GIB, gpu_free_nbytes=20 * GIB)] * 2,
        "nccl",
    ),
    "locked memory": ([a_rank(), a_rank(rdma_devices=["mlx5_0"])], "nccl"),
    "files": ([a_rank(ulimit_open_files=-1), a_rank(ulimit_open_files=64)], "gloo"),
    "shm": ([a_rank(shm_free_nbytes=64 * 2**20)], "gloo"),
    "memory": ([a_rank("a"), a_rank("b", free_memory_nbytes=2**27)], "gloo"),
    "less memory": (
        [a_rank(host, free_memory_nbytes=n * GIB) for host, n in (("a", 60), ("b", 64), ("c", 9))],
        "gloo",
    ),
    "MTU": (
        [a_rank("a", **net(mtu=9000)), a_rank("b", **net(mtu=9000)), a_rank("c", **net())],
        "gloo",
    ),
    "speed": ([a_rank("a", **net(1.25e9)), a_rank("b", **net(1.25e8))], "gloo"),
    "own name": ([a_rank("a"), a_rank("b", resolved="127.0.1.1")], "gloo"),
    "clock": ([a_rank("a"), a_rank("b", clock_ahead_seconds=-3600.0)], "gloo"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_and_named(name: str, frozen: Frozen) -> None:
    """One finding of this severity and code, that says where, and what to do."""
    ranks, backend = WRONG[name]
    (found,) = checks.find_all(a_setup(*map(dict, ranks), backend=backend))
    assert found.next_step
    frozen.findings([found])


@pytest.mark.parametrize("installed", [True, False])
def test_what_nvml_does_not_tell_is_not_checked(
    installed: bool, monkeypatch: pytest.MonkeyPatch, frozen: Frozen
) -> None:
    """Where NVML does not know a GPU, as those of AMD, the doctor says what it has not checked."""
    monkeypatch.setattr(gpu_facts, "find_spec", lambda name: object() if installed else None)
    silent = {"gpu_uuid": "GPU-1", "gpu_before": None}
    setup = a_setup(a_rank(), a_rank())
    (unchecked,) = measure._unchecked(setup, [silent, silent], None)
    frozen.text(unchecked)
    known = {"gpu_uuid": "GPU-1", "gpu_before": {"nvlinks_active": None}}
    assert list(measure._unchecked(setup, [known, {"gpu_uuid": None}], None)) == []


def test_a_variable_wins_over_a_file_of_nccl() -> None:
    """What the environment sets, a file does not change, and an earlier file wins over a later."""
    files = {"mine": {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL"}, "/etc": {"NCCL_PROTO": "Simple"}}
    facts = a_rank(variables={"NCCL_ALGO": "Ring"}, nccl_conf=files)
    assert merge_settings(facts) == {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}
    text = the_block(facts)
    assert "nccl.conf  mine: NCCL_ALGO=Tree NCCL_PROTO=LL; /etc: NCCL_PROTO=Simple\n" in text


def test_links_and_plug_ins_are_shown(frozen: Frozen) -> None:
    """The block has the lanes of a GPU's slot, its NVLinks, and what NCCL has loaded."""
    slot = {"width": 16.0, "width_allowed": 16.0, "transfers_per_second": 32e9}
    frozen.text(
        the_block(a_rank(gpu_pcie=slot, gpu_nvlinks_active=18, nccl_plugins="libnccl-net.so"))
    )


def test_leftover_settings_cost_where_they_act() -> None:
    """CUDA_LAUNCH_BLOCKING costs on a GPU, whatever spells yes; not on a CPU, and 0 is not yes."""
    for value in ("1", "ON", "true"):
        ranks = [a_rank(variables={"CUDA_LAUNCH_BLOCKING": value})]
        (found,) = checks.find_all(a_setup(*ranks, device="cuda"))
        assert found.code == "debug-setting"
        assert checks.find_all(a_setup(*ranks)) == ()
    off = a_rank(variables={"CUDA_LAUNCH_BLOCKING": "0"})
    assert checks.find_all(a_setup(off, device="cuda")) == ()


def test_nothing_is_told_twice(frozen: Frozen) -> None:
    """Of mixed versions of torch the library follows; a host with more threads than cores is told
    by the check of all runs, and where cores are free instead, not as crowded as well."""
    mixed = a_setup(a_rank(), a_rank(torch="2.7.0", library="gloo of torch 2.7.0"))
    assert checks.find_all(mixed) == ()
    crowded = [a_rank(cpuset="0", allowed_cpus="0", threads=2)]
    assert checks.find_all(a_setup(*crowded)) == ()
    bound = [a_rank(cpuset="2", host=a_host()), a_rank(cpuset="2"), a_rank(cpuset="3")]
    each = Examination("preflight", 0, "gloo", 1.0, findings=checks.find_all(a_setup(*bound)))
    launch = a_launch(ranks=tuple(bound))
    run = replace(a_run(), command="doctor", launches=(launch,), examinations=(each,))
    frozen.findings(findings.findings(run))
    frozen.findings(findings.findings(replace(run, examinations=())))
    same = a_setup(*[a_rank(cpuset="0-1", threads=2) for _ in range(2)])
    assert checks.find_all(same) == ()  # all as one: crowded, which may be meant


def test_what_a_launcher_sets_is_nobodys_difference() -> None:
    """torchrun sets OMP_NUM_THREADS=1 on hosts with several ranks only; empty is not set."""
    ranks = [a_rank("a", variables={"OMP_NUM_THREADS": "1", "NCCL_ALGO": ""}), a_rank("b")]
    setup = a_setup(*ranks)
    assert checks.find_all(setup) == ()
    assert [f.code for f in checks.find_all(replace(setup, launcher="srun"))] == [
        "variable-differs"
    ]


def test_a_check_that_is_added_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry in CHECKS adds a check; where its fact is unknown, it is not made."""
    mine = Check("hot", lambda celsius: celsius > 90, "rank", "{who}: {celsius} °C", "cool it")
    monkeypatch.setattr(checks, "CHECKS", [mine])
    (found,) = checks.find_all(a_setup(a_rank(), a_rank(celsius=95), a_rank(celsius=50)))
    assert found == Finding(
        "warning", "hot", "rank 1 (a): 95 °C", "cool it", {"rank": 1, "host": "a"}
    )


# --- the block for an issue -----------------------------------------------------------------------


def the_block(*ranks: dict[str, Any]) -> str:
    """What is shown of these ranks."""
    setup = a_setup(*ranks)
    return lay_out(measure.build_table(setup))


def test_the_block_folds_what_is_the_same(frozen: Frozen) -> None:
    """What all ranks share stands there once, what differs with its ranks; what a host told of
    itself holds for all its ranks, and Slurm's many variables are left out."""
    one = {"NCCL_ALGO": "Ring", "SLURM_JOB_ID": "7"}
    text = the_block(
        a_rank(variables=one), a_rank(variables=one), a_rank("b", cpuset="0-3", variables=one)
    )
    assert "SLURM" not in text
    frozen.text(text)


def test_the_cores_that_a_control_group_allows(tmp_path: Path) -> None:
    """The innermost group that tells, v2 or v1; None where none does."""
    assert environment.allowed_cpus(tmp_path) is None
    for name, text in {
        "proc/self/cgroup": "4:cpuset:/job\n0::/job/step\n",
        "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "0-7\n",
        "sys/fs/cgroup/cpuset/job/cpuset.effective_cpus": "0-3\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert environment.allowed_cpus(tmp_path) == "0-3"
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (tmp_path / "sys/fs/cgroup/job").mkdir()
    (tmp_path / "sys/fs/cgroup/job/cpuset.cpus.effective").write_text("2-5\n")
    assert environment.allowed_cpus(tmp_path) == "2-5"


# --- names and folds ------------------------------------------------------------------------------


def test_ranks_are_named_in_spans() -> None:
    """Neighbours are a span; values that are equal, lists too, are one group."""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert folded([[1], [2], [1], None]) == [([1], [0, 2]), ([2], [1]), (None, [3])]
    many = Setup([a_rank(str(n)) for n in range(9)], [[n] for n in range(9)])
    assert many.who(range(9)) == "ranks 0-8 (0, 1, 2, 3, and 5 more)"


# --- real ranks -----------------------------------------------------------------------------------


def test_real_ranks_are_compared(pool: RankPool, tmp_path: Path, frozen: Frozen) -> None:
    """Two ranks here: a planted difference is named with its rank; nothing else is above a note;
    the block holds this machine, and no rank's secret."""
    planted = [{"UCX_TLS": "tcp", "NCCL_API_KEY": "hunter2"}, {"UCX_TLS": "shm"}]
    environs = [
        {**its, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank, its in enumerate(planted)
    ]
    words = ("doctor", "--only", "preflight", "--output", "run", "--init-method")
    done = pool.ask(tmp_path, environs, *words, f"file://{tmp_path / 'meeting'}")
    assert done.returncode == 0, done
    run = store.read(tmp_path / "run")
    (found,) = [f for f in run.findings if f.severity != "note"]
    frozen.facts([found.severity, found.code, found.place["rank"], found.place["variable"]])
    assert f"cores {environment.compact(os.sched_getaffinity(0))}" in done.stdout
    assert "UCX_TLS=tcp (rank 0); shm (rank 1)" in done.stdout
    assert "hunter2" not in done.stdout + (tmp_path / "run/run.json").read_text()


def test_a_time_of_day_that_is_off_is_found(pool: RankPool, tmp_path: Path, frozen: Frozen) -> None:
    """Rank 1 reads a clock of its own, which started a day before, and a time of day that is 90 s
    ahead: the 90 s are found."""
    environs = [
        {"RANK": "0", "LOCAL_RANK": "0"},
        {"RANK": "1", "LOCAL_RANK": "1", "AHEAD_NS": str(86_400 * 10**9),
         "DAY_AHEAD_NS": str(90 * 10**9)},
    ]  # fmt: skip
    words = ("doctor", "--only", "preflight", "--import", "shifted_clock", "--output", "run")
    done = pool.ask(tmp_path, environs, *words, "--init-method", f"file://{tmp_path / 'meeting'}")
    assert done.returncode == 0, done
    (examined,) = store.read(tmp_path / "run").examinations
    frozen.facts([round(its["clock_ahead_seconds"]) for its in examined.figures["ranks"]])
