"""Preflight: each difference and danger is found and named, a healthy set-up is left in peace, and
the block for an issue tells no secret."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool
from rank_setups import GIB, a_host, a_rank, a_setup
from stored_runs import a_launch, a_run

from ddpbench.analysis import findings
from ddpbench.analysis.rank_setup import Setup, folded, merge_settings
from ddpbench.doctor.preflight import checks, examine
from ddpbench.doctor.preflight.table import build_tables
from ddpbench.records import store
from ddpbench.records.schema import Examination, Finding
from ddpbench.records.wording import name_ranks
from ddpbench.render.doctor import table_blocks
from ddpbench.render.style import TERMINAL
from ddpbench.runtime import environment


def net(speed: float | None = 1.25e9, mtu: int = 1500) -> dict[str, Any]:
    """An interface over which a rank reaches other hosts."""
    used = {"name": "eth0", "mtu_nbytes": mtu, "nominal_bytes_per_second": speed}
    return {"interface": used, "addresses": ["10.0.0.1"]}


def test_a_healthy_set_up_is_left_in_peace() -> None:
    """Alike ranks on one host, on two, with GPUs; devices, cores and log files of their own, and a
    variable of one rank alone that steers nothing, are no differences. A small GPU holds the rank's
    own context."""
    assert checks.findings(a_setup(a_rank())) == ()
    assert checks.findings(a_setup(*[a_rank() for _ in range(8)])) == ()
    two = [a_rank(host, **net(), variables={"NCCL_ALGO": "Ring"}) for host in "aabb"]
    assert checks.findings(a_setup(*two)) == ()
    small = a_rank(gpu_uuid="GPU-1", gpu_nbytes=6 * GIB, gpu_free_nbytes=4.5 * GIB)
    assert checks.findings(a_setup(small)) == ()
    gpus = [
        a_rank(
            cpuset=str(n), gpu_uuid=f"GPU-{n}", gpu_name="H", gpu_numa_node=0, gpu_index=n,
            gpu_nbytes=80 * GIB, gpu_free_nbytes=79 * GIB,
            variables={"CUDA_VISIBLE_DEVICES": str(n), "NCCL_IB_HCA": f"mlx5_{n}",
                       "SLURM_PROCID": str(n), "NCCL_DEBUG_FILE": f"log.{n}"},
        )
        for n in range(4)
    ]  # fmt: skip
    assert checks.findings(a_setup(*gpus, backend="nccl", device="cuda")) == ()


# What is wrong → (ranks, backend, severity, code, what the sentence has, what the place has)
WRONG: dict[str, tuple[list[dict[str, Any]], str, str, str, str, dict[str, Any]]] = {
    "library": (
        [a_rank(library="NCCL 2.27.3"), a_rank(), a_rank()], "nccl", "warning", "mixed-versions",
        "NCCL 2.27.3 on rank 0 (a), gloo of torch 2.13.0 on ranks 1-2 (a)", {"rank": 0},
    ),
    "driver": (
        [a_rank(h, host=a_host(driver=d)) for h, d in (("a", "550"), ("b", "550"), ("c", "535"))],
        "nccl", "warning", "mixed-versions", "550 on ranks 0-1 (a, b), 535 on rank 2 (c)",
        {"host": "c"},
    ),
    "kernel": (
        [a_rank("a"), a_rank("b", host=a_host(kernel="5.4"))], "gloo", "note", "mixed-systems",
        "Linux 6.1.0 on rank 0 (a), 5.4 on rank 1 (b)", {"host": "b"},
    ),
    "smt": (
        [a_rank("a", host=a_host(smt=True)), a_rank("b", host=a_host(smt=False))], "gloo", "note",
        "mixed-hardware", "on on rank 0 (a), off on rank 1 (b)", {"host": "b"},
    ),
    "variable": (
        [a_rank(), a_rank(), a_rank(variables={"OMP_NUM_THREADS": "4"})], "gloo", "warning",
        "variable-differs", "OMP_NUM_THREADS is not set on ranks 0-1 (a), 4 on rank 2 (a)",
        {"rank": 2, "variable": "OMP_NUM_THREADS"},
    ),
    "algorithm": (
        [a_rank(variables={"NCCL_ALGO": each}) for each in ("Ring", "Ring", "Tree")], "nccl",
        "error", "variable-differs", "Ring on ranks 0-1 (a), Tree on rank 2 (a)", {"rank": 2},
    ),
    "debugging": (
        [a_rank(variables={"PYTHONDEVMODE": "1"})] * 2, "gloo", "note", "debug-setting",
        "PYTHONDEVMODE=1 is set on ranks 0-1 (a)", {"variable": "PYTHONDEVMODE"},
    ),
    "debug build": (
        [a_rank(), a_rank(debug_builds=["torch"])], "gloo", "warning", "debug-build",
        "torch on rank 1 (a)", {"rank": 1},
    ),
    "same core": (
        [a_rank(cpuset="2"), a_rank(cpuset="2"), a_rank(cpuset="3")], "gloo", "warning",
        "shared-cores", "ranks 0-1 (a), with 2 compute threads in all, are bound to the same core "
        "2, while cores 0, 1, 4, 5, 6, 7 of a", {"ranks": [0, 1]},
    ),
    "narrow": (
        [a_rank(cpuset="0-3"), a_rank(cpuset="4", threads=2)], "gloo", "warning",
        "narrow-affinity", "rank 1 (a) may use core 4 only, for 2 compute threads", {"rank": 1},
    ),
    "far GPU": (
        [a_rank(), a_rank(gpu_numa_node=1, gpu_index=5)], "gloo", "warning", "far-gpu",
        "rank 1 (a) is bound to cores of NUMA node 0, its GPU 5 is at node 1", {"rank": 1},
    ),
    "narrow slot": (
        [a_rank(), a_rank(gpu_pcie={"width": 8.0, "width_allowed": 16.0}, gpu_bus="0000:65:00.0")],
        "nccl", "warning", "narrow-pcie", "the GPU of rank 1 (a) runs at x8 of x16", {"rank": 1},
    ),
    "lost data": (
        [a_rank(gpu_memory_errors=0), a_rank(gpu_memory_errors=2)], "nccl", "warning",
        "gpu-memory-errors", "rank 1 (a) has had 2 errors that ECC could not correct", {"rank": 1},
    ),
    "NVLink down": (
        [a_rank(gpu_nvlinks_active=n) for n in (18, 18, 17)], "nccl", "warning", "mixed-links",
        "the number of active NVLinks is 18 on ranks 0-1 (a), 17 on rank 2 (a)", {"rank": 2},
    ),
    "ECC": (
        [a_rank(gpu_ecc=on) for on in (True, True, False)], "nccl", "note", "mixed-hardware",
        "ECC of the GPU is on on ranks 0-1 (a), off on rank 2 (a)", {"rank": 2},
    ),
    "plug-in": (
        [a_rank("a", nccl_plugins="libnccl-net.so"), a_rank("b", nccl_plugins="none")], "nccl",
        "warning", "mixed-versions", "libnccl-net.so on rank 0 (a), none on rank 1 (b)",
        {"host": "b"},
    ),
    "TF32": (
        [a_rank(), a_rank(), a_rank(variables={"NVIDIA_TF32_OVERRIDE": "0"})], "nccl", "warning",
        "variable-differs", "NVIDIA_TF32_OVERRIDE is not set on ranks 0-1 (a), 0 on rank 2 (a)",
        {"rank": 2},
    ),
    "file of a host": (
        [a_rank("a", nccl_conf={"/etc/nccl.conf": {"NCCL_ALGO": "Ring"}}), a_rank("b")], "nccl",
        "error", "variable-differs", "NCCL_ALGO is Ring on rank 0 (a), not set on rank 1 (b)",
        {"variable": "NCCL_ALGO"},
    ),
    "used GPU": (
        [a_rank(gpu_uuid="x", gpu_nbytes=80 * GIB, gpu_free_nbytes=20 * GIB)], "nccl", "warning",
        "gpu-in-use", "60.0 of 80.0 GiB of the GPU of rank 0 (a)", {"rank": 0},
    ),
    "shared GPU": (
        [a_rank(gpu_uuid="x", gpu_nbytes=80 * GIB, gpu_free_nbytes=20 * GIB)] * 2, "nccl", "note",
        "shared-gpu", "ranks 0-1 (a) share one GPU", {"ranks": [0, 1]},
    ),
    "locked memory": (
        [a_rank(), a_rank(rdma_devices=["mlx5_0"])], "nccl", "warning", "memlock",
        "rank 1 (a) may lock 64 KiB", {"rank": 1},
    ),
    "files": (
        [a_rank(ulimit_open_files=-1), a_rank(ulimit_open_files=64)], "gloo", "warning",
        "open-files", "rank 1 (a) may open 64 files", {"rank": 1},
    ),
    "shm": (
        [a_rank(shm_free_nbytes=64 * 2**20)], "gloo", "note", "small-shm", "64 MiB free", {},
    ),
    "memory": (
        [a_rank("a"), a_rank("b", free_memory_nbytes=2**27)], "gloo", "warning", "low-memory",
        "b has 0.1 GiB of memory free", {"host": "b"},
    ),
    "less memory": (
        [a_rank(host, free_memory_nbytes=n * GIB) for host, n in (("a", 60), ("b", 64), ("c", 9))],
        "gloo", "note", "low-memory", "c has 9.0 GiB of memory free for 1 ranks", {"host": "c"},
    ),
    "MTU": (
        [a_rank("a", **net(mtu=9000)), a_rank("b", **net(mtu=9000)), a_rank("c", **net())],
        "gloo", "warning", "interface-differs",
        "the MTU is 9000 bytes on a (eth0), b (eth0), 1500 bytes on c (eth0)", {"host": "c"},
    ),
    "speed": (
        [a_rank("a", **net(1.25e9)), a_rank("b", **net(1.25e8))], "gloo", "warning",
        "interface-differs", "10 Gbit/s on a (eth0), 1 Gbit/s on b (eth0)", {"host": "b"},
    ),
    "own name": (
        [a_rank("a"), a_rank("b", resolved="127.0.1.1")], "gloo", "note", "own-name",
        "b resolves its own name to 127.0.1.1", {"host": "b"},
    ),
    "clock": (
        [a_rank("a"), a_rank("b", clock_ahead_seconds=-3600.0)], "gloo", "warning",
        "clocks-apart", "compared with a: b -3600.0 s", {"host": "b"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_and_named(name: str) -> None:
    """One finding of this severity and code, that says where, and what to do."""
    ranks, backend, severity, code, words, place = WRONG[name]
    (found,) = checks.findings(a_setup(*map(dict, ranks), backend=backend))
    assert (found.severity, found.code) == (severity, code)
    assert words in found.sentence
    assert found.place | place == found.place
    assert found.next_step


@pytest.mark.parametrize("installed", [True, False])
def test_what_nvml_does_not_tell_is_not_checked(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where NVML does not know a GPU, as those of AMD, the doctor says what it has not checked."""
    monkeypatch.setattr(examine, "find_spec", lambda name: object() if installed else None)
    reason = "NVML does not know these GPUs" if installed else "pip install nvidia-ml-py"
    silent = {"gpu_uuid": "GPU-1", "gpu_before": None}
    setup = a_setup(a_rank(), a_rank())
    unchecked = list(examine._unchecked(setup, [silent, silent], None))
    assert unchecked == [f"clocks, NVLinks and memory errors of GPUs: {reason}"]
    known = {"gpu_uuid": "GPU-1", "gpu_before": {"nvlinks_active": None}}
    assert list(examine._unchecked(setup, [known, {"gpu_uuid": None}], None)) == []


def test_a_variable_wins_over_a_file_of_nccl() -> None:
    """What the environment sets, a file does not change, and an earlier file wins over a later."""
    files = {"mine": {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL"}, "/etc": {"NCCL_PROTO": "Simple"}}
    facts = a_rank(variables={"NCCL_ALGO": "Ring"}, nccl_conf=files)
    assert merge_settings(facts) == {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}
    text = the_block(facts)
    assert "nccl.conf   mine: NCCL_ALGO=Tree NCCL_PROTO=LL; /etc: NCCL_PROTO=Simple\n" in text


def test_links_and_plug_ins_are_shown() -> None:
    """The block has the lanes of a GPU's slot, its NVLinks, and what NCCL has loaded."""
    slot = {"width": 16.0, "width_allowed": 16.0, "transfers_per_second": 32e9}
    text = the_block(a_rank(gpu_pcie=slot, gpu_nvlinks_active=18, nccl_plugins="libnccl-net.so"))
    assert "links       PCIe x16 at 32 GT/s, 18 NVLinks\n" in text
    assert "plug-ins    libnccl-net.so\n" in text


@pytest.mark.parametrize("value", ["1", "ON", "true"])
def test_leftover_settings_cost_where_they_act(value: str) -> None:
    """CUDA_LAUNCH_BLOCKING costs on a GPU, whatever spells yes; not on a CPU, and 0 is not yes."""
    ranks = [a_rank(variables={"CUDA_LAUNCH_BLOCKING": value})]
    assert [f.code for f in checks.findings(a_setup(*ranks, device="cuda"))] == ["debug-setting"]
    assert checks.findings(a_setup(*ranks)) == ()
    off = a_rank(variables={"CUDA_LAUNCH_BLOCKING": "0"})
    assert checks.findings(a_setup(off, device="cuda")) == ()


def test_nothing_is_told_twice() -> None:
    """Of mixed versions of torch the library follows; a host with more threads than cores is told
    by the check of all runs, and where cores are free instead, not as crowded as well."""
    mixed = a_setup(a_rank(), a_rank(torch="2.7.0", library="gloo of torch 2.7.0"))
    assert checks.findings(mixed) == ()
    crowded = [a_rank(cpuset="0", allowed_cpus="0", threads=2)]
    assert checks.findings(a_setup(*crowded)) == ()
    bound = [a_rank(cpuset="2", host=a_host()), a_rank(cpuset="2"), a_rank(cpuset="3")]
    each = Examination("preflight", 0, "gloo", 1.0, findings=checks.findings(a_setup(*bound)))
    launch = a_launch(ranks=tuple(bound))
    run = replace(a_run(), command="doctor", launches=(launch,), examinations=(each,))
    assert [f.code for f in findings.findings(run)] == ["shared-cores"]
    (finding,) = findings.findings(replace(run, examinations=()))
    assert finding.code == "oversubscribed"
    assert finding.next_step == (
        "use -n 2 or fewer; or bind the ranks to more cores: 6 others are allowed here"
    )
    same = a_setup(*[a_rank(cpuset="0-1", threads=2) for _ in range(2)])
    assert checks.findings(same) == ()  # all as one: crowded, which may be meant


def test_what_a_launcher_sets_is_nobodys_difference() -> None:
    """torchrun sets OMP_NUM_THREADS=1 on hosts with several ranks only; empty is not set."""
    ranks = [a_rank("a", variables={"OMP_NUM_THREADS": "1", "NCCL_ALGO": ""}), a_rank("b")]
    setup = a_setup(*ranks)
    assert checks.findings(setup) == ()
    assert [f.code for f in checks.findings(replace(setup, launcher="srun"))] == [
        "variable-differs"
    ]


def test_a_check_that_is_added_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function in CHECKS adds a check."""
    mine = Finding("note", "mine", "seen")
    monkeypatch.setattr(checks, "CHECKS", (lambda setup: iter([mine]),))
    assert checks.findings(a_setup(a_rank())) == (mine,)


# --- the block for an issue -----------------------------------------------------------------------


def the_block(*ranks: dict[str, Any]) -> str:
    """What is shown of these ranks."""
    setup = a_setup(*ranks)
    figures = {
        "backend": "gloo", "device": "cpu", "launcher": "torchrun", "hosts": setup.hosts,
        "ranks": list(setup.ranks),
    }  # fmt: skip
    (table,) = build_tables(figures, "gloo")
    (text,) = table_blocks(table, TERMINAL)
    return text


def test_the_block_folds_what_is_the_same() -> None:
    """What all ranks share stands there once, what differs with its ranks; it is fenced; what a
    host told of itself holds for all its ranks, and Slurm's many variables are left out."""
    one = {"NCCL_ALGO": "Ring", "SLURM_JOB_ID": "7"}
    text = the_block(
        a_rank(variables=one), a_rank(variables=one), a_rank("b", cpuset="0-3", variables=one)
    )
    assert text.splitlines()[1] == "```" == text.splitlines()[-1]
    assert "ranks       3 on 2 hosts, gloo, cpu, started by torchrun" in text
    assert "host        a (ranks 0-1); b (rank 2)" in text
    assert "versions    ddpbench 0.1.0, torch 2.13.0, python 3.11.9\n" in text
    assert "threads 1, on cores 0-7 of NUMA node 0 (ranks 0-1); " in text
    assert "cpu         CPU X, 8 cores\n" in text
    assert "variables   NCCL_ALGO=Ring\n" in text
    assert "SLURM" not in text
    assert build_tables({}, "gloo") == ()


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


def test_real_ranks_are_compared(pool: RankPool, tmp_path: Path) -> None:
    """Two ranks here: a planted difference is named with its rank; nothing else is above a note;
    the block holds this machine, and no rank's secret."""
    planted = [{"UCX_TLS": "tcp", "NCCL_API_KEY": "hunter2"}, {"UCX_TLS": "shm"}]
    environs = [
        {**its, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank, its in enumerate(planted)
    ]
    words = ("doctor", "--only", "preflight", "--output", "run", "--init-method")
    pool.call(2, tmp_path, "--version")
    try:
        done = pool.ask(tmp_path, environs, *words, f"file://{tmp_path / 'meeting'}")
    finally:
        pool.ask(Path.cwd(), [{"UCX_TLS": "", "NCCL_API_KEY": ""}] * 2, "--version")
    assert done.returncode == 0, done
    run = store.read(tmp_path / "run")
    (found,) = [f for f in run.findings if f.severity != "note"]
    assert "UCX_TLS is tcp on rank 0" in found.sentence
    assert f"cores {environment.compact(os.sched_getaffinity(0))}" in done.stdout
    assert "```" in done.stdout
    assert "UCX_TLS=tcp (rank 0); shm (rank 1)" in done.stdout
    assert "hunter2" not in done.stdout + (tmp_path / "run/run.json").read_text()


def test_a_time_of_day_that_is_off_is_found(pool: RankPool, tmp_path: Path) -> None:
    """Rank 1 reads a clock of its own, which started a day before, and a time of day that is 90 s
    ahead: the 90 s are found."""
    environs = [
        {"RANK": "0", "LOCAL_RANK": "0", "AHEAD_NS": "", "DAY_AHEAD_NS": ""},
        {"RANK": "1", "LOCAL_RANK": "1", "AHEAD_NS": str(86_400 * 10**9),
         "DAY_AHEAD_NS": str(90 * 10**9)},
    ]  # fmt: skip
    words = ("doctor", "--only", "preflight", "--import", "shifted_clock", "--output", "run")
    pool.call(2, tmp_path, "--version")
    try:
        done = pool.ask(
            tmp_path, environs, *words, "--init-method", f"file://{tmp_path / 'meeting'}"
        )
    finally:
        pool.ask(Path.cwd(), [{"AHEAD_NS": "", "DAY_AHEAD_NS": ""}] * 2, "--version")
    assert done.returncode == 0, done
    (examined,) = store.read(tmp_path / "run").examinations
    ahead = [its["clock_ahead_seconds"] for its in examined.figures["ranks"]]
    assert ahead == [0.0, pytest.approx(90.0, abs=0.5)]
