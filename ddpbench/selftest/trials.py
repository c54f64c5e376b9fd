"""The trials of the self-test in their order: one entry of TRIALS adds one."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata

from ddpbench.analysis.selftest import Expected
from ddpbench.selftest import hosts

# Long enough for the ranks of a busy machine, and short enough to wait for.
TIMEOUT_SECONDS = 10
TINY_NBYTES = 4096  # of a disk that holds the first record of a run but not the second


@dataclass(frozen=True)
class Trial:
    """A fault, the command that plants it, and the expected outcome.

    fault          name of the fault; several trials may share it
    planted        short description of the fault
    arguments      command line of ddpbench
    find_obstacle  () → one sentence on why it cannot be planted here; None if it can
    seconds        deadline of the command
    tiny_disk      whether results go to a very small disk
    rates          link rate of each simulated host in bits per second; empty: run on this host
    pairs          lower rates between two of these hosts
    """

    fault: str
    planted: str
    arguments: tuple[str, ...]
    expected: Expected
    find_obstacle: Callable[[], str | None] = lambda: None
    seconds: float = 90.0
    tiny_disk: bool = False
    rates: tuple[float, ...] = ()
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)


def _step(fault: str, *options: str, ranks: int = 3) -> tuple[str, ...]:
    """Return a command for DDP steps with a fault, in enough ranks for a majority without it."""
    command = f"ddp -n {ranks} --backend gloo --device cpu --workload mlp --width 64 --depth 2"
    command += f" --threads 1 --in-a-row 1 --timeout {TIMEOUT_SECONDS}"
    rounds = options or ("--rounds", "4", "--no-budget")
    return (*command.split(), *rounds, "--inject", fault)


def _sharded(fault: str, way: str) -> tuple[str, ...]:
    """Return a command for steps of a model that four ranks divide in this way, with a fault."""
    options = ("--rounds", "4", "--no-budget", "--parallel", way, "--timeout", "60")
    return _step(fault, *options, ranks=4)


def _doctor(examination: str, *options: str) -> tuple[str, ...]:
    """Return a command for one examination, whose exit code is 1 after a warning."""
    command = f"doctor --backend gloo --device cpu --only {examination} --fail-on warning"
    return (*command.split(), "--seconds", "8", *options)


def _planted(fault: str, examination: str = "preflight") -> tuple[str, ...]:
    """Return a command for one examination of two ranks with a fault in their set-up."""
    return _doctor(examination, "-n", "2", "--timeout", "30", "--inject", fault)


def _replica(cause: str, place: str) -> Expected:
    """Return the outcome that replicas differ in `place` for this cause."""
    return Expected((4,), cause, rf"after step 6: {place}")


def _ended(found: str, named: str) -> Expected:
    """Return the outcome that a deadline, an error or a death ends the run."""
    return Expected((5,), found, named)


def _mismatch(one: str, others: str) -> Expected:
    """Return the outcome that rank 1 calls another collective; gloo may abort a neighbour then."""
    named = rf"rank 1 calls #\d+ {one}( of .+)?( at .+)? where ranks? [\d, ]+ calls? {others}"
    return _ended(r"calls #\d+ .* where ranks? ", named)


@functools.cache
def no_hosts() -> str | None:
    """Return why links of a known rate cannot be simulated here; None if they can."""
    return hosts.missing()


@functools.cache
def no_hsdp() -> str | None:
    """Return why gloo of this torch cannot train HSDP; None if it can."""
    version = metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) >= (2, 9):
        return None
    return f"gloo of torch {version} cannot average, which HSDP needs: install torch 2.9 or newer"


@functools.cache
def no_mount() -> str | None:
    """Return why a disk of a known size cannot be mounted here; None if it can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "mounting a small disk needs root and unshare (Debian: util-linux)"
    done = subprocess.run(
        on_tiny_disk("/mnt", ["true"]), capture_output=True, text=True, check=False, timeout=20
    )
    return None if done.returncode == 0 else f"mounting a small disk failed: {done.stderr.strip()}"


def on_tiny_disk(folder: str, command: list[str]) -> list[str]:
    """Return the command that runs `command` with a tiny disk mounted on a folder.

    Only this command and its children see the disk. It disappears when the last of them ends.
    """
    mount = f'mount -t tmpfs -o size={TINY_NBYTES} tmpfs "$0" && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, folder, *command]


WEIGHT = r"parameter 0\.weight .* differs\. Rank 1: "
SECOND = r"dp_replicate=1 \(ranks 2, 3\)"
SUM, GATHER = r"all_reduce float32\[1024\]", r"all_gather float32\[1024\]"
TRIALS = (
    Trial(
        "slow-rank",
        "rank 1 shares its core with 3 busy processes",
        _planted("slow-rank:rank=1", "stragglers"),
        Expected((1,), r"slow-rank: ", r"slow-rank: rank 1\b"),
    ),
    Trial(
        "slow-rank",
        "rank 1's forward takes 40 ms longer",
        _step("slow-rank:rank=1,ms=40,step=1", "--rounds", "12"),
        Expected((0,), r"late-rank: ", r"late-rank: .*rank 1 is late"),
    ),
    Trial(
        "stop",
        "rank 1 is stopped in step 6",
        _step("stop:rank=1,step=6"),
        _ended(r"is stopped \(SIGSTOP\)", r"rank 1 \(\S+, pid \d+\) is stopped"),
    ),
    Trial(
        "kill",
        "rank 1 is killed in step 6",
        _step("kill:rank=1,step=6"),
        _ended(r"has died", r"rank 1 \(\S+, pid \d+\) has died"),
    ),
    Trial(
        "hang",
        "rank 1 sleeps outside any collective",
        _step("hang:rank=1,step=6"),
        _ended(r"never joined|missed the deadline", r"rank 1\b.*\bhang \(step_faults\.py:\d+\)"),
    ),
    Trial(
        "slow-link",
        "host1-host2 at 100 Mbit/s, others at 1 Gbit/s",
        _doctor("links", "--by", "host"),
        Expected((1,), r"slow-link: ", r"slow-link: .*host1\b.*host2\b"),
        no_hosts,
        rates=(1e9,) * 4,
        pairs={(0, 1): 1e8},
    ),
    Trial(
        "slow-host",
        "host3's link at 100 Mbit/s, others at 1 Gbit/s",
        _doctor("links", "--by", "host"),
        Expected((1,), r"slow-host: ", r"slow-host: .*host3\b"),
        no_hosts,
        rates=(1e9, 1e9, 1e8, 1e9),
    ),
    Trial(
        "wrong-shape",
        "rank 1 reduces float32[2048], others [1024]",
        _step("wrong-shape:rank=1,step=6", ranks=4),
        _mismatch(r"all_reduce float32\[2048\]", SUM),
    ),
    Trial(
        "wrong-dtype",
        "rank 1 reduces float64[1024], others float32",
        _step("wrong-dtype:rank=1,step=6", ranks=4),
        _mismatch(r"all_reduce float64\[1024\]", SUM),
    ),
    Trial(
        "wrong-order",
        "rank 1 calls all_gather before all_reduce",
        _step("wrong-order:rank=1,step=6"),
        _mismatch(GATHER, SUM),
    ),
    Trial(
        "skipped",
        "rank 1 skips an all_gather",
        _step("skipped:rank=1,step=6"),
        _mismatch(r"all_reduce .*", GATHER),
    ),
    Trial(
        "corrupted-result",
        "one bit of rank 1's reduced gradient flips",
        _step("corrupted-result:rank=1,step=6"),
        _replica(r"corrupted-result: ", r".*gradient 0\.weight .*: Rank 1: .* bit 20 "),
    ),
    Trial(
        "bit-flip",
        "one bit of rank 1's replica flips",
        _step("bit-flip:rank=1,step=6"),
        _replica(r"bit-flip: ", rf"{WEIGHT}.* bit 12 "),
    ),
    Trial(
        "learning-rate",
        "rank 1 uses another learning rate",
        _step("learning-rate:rank=1,step=6"),
        _replica(r"different-options: ", r".*optimizer \S+lr .*: Rank 1: 0\.05 "),
    ),
    Trial(
        "nan",
        "an element of rank 1's replica becomes NaN",
        _step("nan:rank=1,step=6"),
        _replica(r"non-finite", r"parameter 0\.weight: 1 element NaN or infinite in rank 1\b"),
    ),
    Trial(
        "other-seed",
        "the HSDP replica of ranks 2, 3 has another seed",
        _sharded("other-seed:rank=2", "hsdp"),
        Expected(
            (4,),
            r"replicas-initialised-apart: ",
            rf"after step 1: {SECOND}: .* differ from dp_replicate=0,",
        ),
        no_hsdp,
    ),
    Trial(
        "missed-sync",
        "ranks 1, 3 skip an all_reduce of HSDP",
        _sharded("missed-sync:rank=3,step=6", "hsdp"),
        _replica(
            r"gradients-changed-apart: ", r"dp_replicate=1, dp_shard=1 \(rank 3\): .*gradients"
        ),
        no_hsdp,
    ),
    Trial(
        "one-rank-update",
        "rank 1 alone updates a tensor-parallel bias",
        _sharded("one-rank-update:rank=1,step=6", "tp"),
        _replica(r"one-tensor: ", r"tp=1 \(rank 1\): parameter 2\.bias .* differs from tp=0, 2-3"),
    ),
    Trial(
        "flipped-shard",
        "one bit of rank 3's shard flips under HSDP",
        _sharded("flipped-shard:rank=3,step=6", "hsdp"),
        _replica(
            r"bit-flip: ",
            r"dp_replicate=1, dp_shard=1 .*: parameter 0\.weight .*, shard 2 of 2, .* bit 12 ",
        ),
        no_hsdp,
    ),
    Trial(
        "wrong-interface",
        "rank 1's GLOO_SOCKET_IFNAME is nonesuch0",
        _planted("wrong-interface:rank=1"),
        Expected(
            (2,), r"there is no interface nonesuch0", r"\(rank 1\) has GLOO_SOCKET_IFNAME=nonesuch0"
        ),
    ),
    Trial(
        "mixed-versions",
        "rank 1 reports torch 1.0.0",
        _planted("mixed-versions:rank=1"),
        Expected((1,), r"mixed-versions: ", r"rank 1 runs torch 1\.0\.0, rank 0 "),
    ),
    Trial(
        "oversubscribed",
        "2 ranks set OMP_NUM_THREADS to twice the cores",
        _planted("oversubscribed"),
        Expected((1,), r"oversubscribed: ", r"2 ranks with \d+ compute threads .*OMP_NUM_THREADS="),
    ),
    Trial(
        "full-disk",
        "results go to a disk of 4 KiB",
        _doctor("preflight", "-n", "2"),
        _ended(r"results cannot be written", r"/run any more \(No space left on device\)"),
        no_mount,
        tiny_disk=True,
    ),
    Trial(
        "full-disk",
        "no file may exceed 4 KiB",
        _planted("full-disk"),
        _ended(r"results cannot be written", r"/run any more \(File too large\)"),
    ),
    Trial(
        "out-of-memory",
        "rank 1 asks for 1 GiB more than it can get",
        _step("out-of-memory:rank=1,step=6"),
        _ended(r"can't allocate memory|out of memory", r"rank 1\b.*\b1073741824 bytes"),
    ),
)
NAMES = tuple(dict.fromkeys(trial.fault for trial in TRIALS))
