"""What environment.py says about this machine, against what the machine itself shows."""

import dataclasses
import json
import os
import resource
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from ddpbench.runtime import cpu, environment


def write(root: Path, **files: str) -> None:
    """Files under a made-up root; "__" in a name stands for "/"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()


def test_facts_are_true_here() -> None:
    """Versions, process, clock domain and sizes are those that other sources give. All facts
    survive JSON unchanged, without NaN."""
    import torch

    run, rank = environment.run_facts(), environment.rank_facts()
    facts = [run, rank, dataclasses.asdict(cpu.CpuMeter().stop())]
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert run["torch"] == rank["torch"] == str(torch.__version__)
    assert run["torch_build"] == (f"cuda {torch.version.cuda}" if torch.version.cuda else "cpu")
    assert run["kernel"] == os.uname().release
    assert run["cores_logical"] == os.cpu_count()
    assert run["memory_nbytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert rank["hostname"] == socket.gethostname()
    assert rank["pid"] == os.getpid()
    assert rank["threads"] == torch.get_num_threads()
    assert rank["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert f"time:[{rank['time_namespace']}]" == str(Path("/proc/self/ns/time").readlink())
    assert rank["ulimit_open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_machine_that_withholds_everything_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc, /sys, git and network facts there is still a JSON-able answer."""

    def withheld(*_: object) -> None:
        raise PermissionError

    for module, name in ((environment, "read"), (cpu, "read"), (environment, "_output")):
        monkeypatch.setattr(module, name, lambda *_: None)
    for name in ("net_if_addrs", "net_if_stats", "virtual_memory"):
        monkeypatch.setattr(psutil, name, withheld)
    run, rank = environment.run_facts(), environment.rank_facts()
    json.dumps([run, rank])
    assert run["git_revision"] is run["memory_nbytes"] is None
    assert rank["boot_id"] is rank["cgroup_cpu_quota_cores"] is None
    assert environment.interface_of("127.0.0.1")["name"] is None
    use = cpu.CpuMeter().stop()
    assert (use.host_busy_seconds, use.steal_seconds, use.throttled_seconds) == (None, None, None)


def test_secrets_never_appear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a secret in an allow-listed name nor any other variable's value reaches the facts."""
    names = (
        "SLURM_JWT TORCH_HUB_TOKEN NCCL_API_KEY OMPI_secret_thing UCX_PASSWORD MPICH_AUTH "
        "OMP_CREDENTIALS AWS_SECRET_ACCESS_KEY HOME_PAGE MY_NCCL_DEBUG CUDA_VISIBLE_DEVICES_X "
        "OMPI_ARGV"
    )
    for name in names.split():
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("NCCL_NET_URL", "https://me:hunter2@host/path")
    text = json.dumps([environment.run_facts(), environment.rank_facts()])
    assert "hunter2" not in text
    assert "https://***@host/path" in text


def test_variables_that_steer_collectives_are_kept() -> None:
    """Every allow-listed prefix is kept, long values are cut; dropped is the launcher's noise, and
    the folder that each run gives Open MPI: it would make all runs and hosts look different."""
    prefixes = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "OMPI_MCA_", "UCX_", "MPICH_", "SLURM_")
    kept = {f"{prefix}X": "1" for prefix in prefixes} | {"CUDA_VISIBLE_DEVICES": "0,1"}
    kept |= dict.fromkeys(("CUDA_MODULE_LOADING", "HIP_VISIBLE_DEVICES", "RCCL_X"), "1")
    noise = {"PATH": "/bin", "OMPI_MCA_orte_uri": "x", "OMPI_COMM_WORLD_SIZE": "2"}
    backing = "OMPI_MCA_btl_sm_backing_directory"
    noise[backing] = "/dev/shm/ddpbench-x1y2z3"
    assert environment.allowed_variables(kept | noise) == kept
    assert environment.allowed_variables({backing: "/scratch"}) == {backing: "/scratch"}
    assert environment.allowed_variables({"NCCL_X": "a" * 999}) == {"NCCL_X": "a" * 200}


def test_the_revision_is_that_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The revision is the checkout's own, not that of a repository around the current folder."""
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "--allow-empty", "-qm", "x")
    monkeypatch.chdir(tmp_path)
    expected = git(environment.CHECKOUT, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a git hook
    facts = environment.run_facts()
    assert (facts["git_revision"], facts["commit"]) == (expected, None)


def test_cgroup_v2_takes_the_tightest_level(tmp_path: Path) -> None:
    """Of nested groups the smallest quota and limit count; page cache counts as free."""
    write(
        tmp_path,
        proc__self__cgroup="0::/job/step\n",
        **{
            "sys__fs__cgroup__job__cpu.max": "150000 100000\n",
            "sys__fs__cgroup__job__memory.max": "1000\n",
            "sys__fs__cgroup__job__memory.current": "900\n",
            "sys__fs__cgroup__job__memory.stat": "anon 600\ninactive_file 300\n",
            "sys__fs__cgroup__job__step__cpu.max": "max 100000\n",
            "sys__fs__cgroup__job__step__memory.max": "5000\n",
            "sys__fs__cgroup__job__step__memory.current": "100\n",
        },
    )
    assert cpu.cgroup_limits(tmp_path) == {
        "cgroup_cpu_quota_cores": 1.5,
        "cgroup_memory_limit_nbytes": 1000,
        "cgroup_free_nbytes": 400,
    }


def test_cgroup_v1_is_read_too(tmp_path: Path) -> None:
    """v1's files are read, even with paths outside the container."""
    write(
        tmp_path,
        proc__self__cgroup="4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
        **{
            "sys__fs__cgroup__memory__memory.limit_in_bytes": "2000\n",
            "sys__fs__cgroup__memory__memory.usage_in_bytes": "500\n",
            "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "50000\n",
            "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000\n",
        },
    )
    assert list(cpu.cgroup_limits(tmp_path / "nowhere").values()) == [None, None, None]
    assert list(cpu.cgroup_limits(tmp_path).values()) == [0.5, 2000, 1500]


@pytest.mark.parametrize(
    ("busy_seconds", "own", "wall", "cores", "share"),
    [
        (2.0, [0.5, 0.5], 1.0, 4, 0.25),
        (1.0, [0.7, 0.7], 1.0, 2, 0.0),
        (9.0, [], 1.0, 2, 1.0),
        (0.2, [], 0.2, 2, 0.4),
        (0.04, [], 0.2, 2, None),
        (None, [0.1], 1.0, 2, None),
    ],
)
def test_others_share(
    busy_seconds: float | None, own: list[float], wall: float, cores: int, share: float | None
) -> None:
    """The share is between 0 and 1; of a span that is short for the tick it is what others used at
    least; and None where it is unknown or below the tick's resolution."""
    assert cpu.others_share(busy_seconds, own, wall, cores) == pytest.approx(share)
