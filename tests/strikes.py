"""Stops and kills at random moments: every command that starts ranks ends in time, names whom it
lost, and leaves nothing behind.

    python tests/strikes.py 20 [SEED [COMMAND…]]
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from command_lines import clean_environment

from ddpbench.launch import placement

TIMEOUT_SECONDS, BEYOND_SECONDS = 6, 10
MARK = "DDPBENCH_STRIKE"  # in the environment of all that a trial starts
CACHE = f"torchinductor_{getpass.getuser()}"
SWEEP = (
    "collectives",
    "--op",
    "all_reduce",
    "--sizes",
    "4,1K",
    "--slice",
    "0.3",
    "--launches",
    "2",
)
STEPS = ("ddp", "--workload", "mlp", "--width", "16", "--depth", "2", "--rounds", "3")
DOCTOR = ("doctor", "--only", "preflight,stragglers", "--seconds", "3")
COMMANDS = {
    "collectives": SWEEP,
    "ddp": (*STEPS, "--no-budget"),
    "doctor": DOCTOR,
    "ab": ("ab", "--a", "X=1", "--b", "X=2", *SWEEP),
    "calibrate": ("calibrate", "--launches", "6", *SWEEP),
    "launch": ("launch", "--node-rank", "0", "--ranks-per-node", "2", "--master-addr", "127.0.0.1",
               "--master-port", "{port}", "--", *SWEEP),
}  # fmt: skip


@dataclass(frozen=True)
class Strike:
    """What is done to whom: "rank", or what starts ranks ("mpirun", "parent"); when: seconds after
    the first of that kind is there."""

    command: str
    backend: str
    blow: signal.Signals
    victim: str
    when: float

    def __str__(self) -> str:
        blow = self.blow.name
        return f"{self.command} on {self.backend}: {blow} to {self.victim} at {self.when:.3f} s"


def draw(order: random.Random, commands: list[str]) -> Strike:
    """One strike; moments from a millisecond on, short ones as likely as long ones."""
    command = order.choice(commands)
    backend = "gloo" if command == "launch" else order.choice(["gloo", "mpi"])
    blow = order.choice([signal.SIGSTOP, signal.SIGKILL])
    victim = "rank" if order.random() < 0.8 else "mpirun" if backend == "mpi" else "parent"
    if victim == "parent":
        blow = signal.SIGKILL  # one that is stopped goes on when it is continued: Ctrl-Z
    return Strike(command, backend, blow, victim, 10 ** order.uniform(-3, 0.9))


def try_strike(strike: Strike, order: random.Random) -> tuple[float, list[str]] | None:
    """Seconds from the strike to the end, and what went wrong; None where all was over before."""
    with tempfile.TemporaryDirectory(prefix="strike-") as name:
        folder, token = Path(name), uuid.uuid4().hex
        (folder / "tmp").mkdir()
        words = [word.format(port=placement.free_port()) for word in COMMANDS[strike.command]]
        words += ["--backend", strike.backend, "--device", "cpu"]
        words += ["--timeout", str(TIMEOUT_SECONDS)]
        if strike.command != "launch":
            words += ["-n", "2"]
        with (folder / "err").open("w+") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "ddpbench", *words], cwd=folder, start_new_session=True,
                env=clean_environment(**{MARK: token, "TMPDIR": str(folder / "tmp")}),
                stdout=subprocess.DEVNULL, stderr=err,
            )  # fmt: skip
            try:
                pid = _struck(process, strike, order)
                struck = time.monotonic()
                if pid is None:
                    assert process.returncode == 0, (folder / "err").read_text()
                    return None
                shared = {path.name for path in (folder / "tmp").rglob("ddpbench-*")}
                wrong = _awaited(process, token, TIMEOUT_SECONDS + BEYOND_SECONDS)
                seconds = time.monotonic() - struck
            finally:
                for each in list_members(token):
                    each.kill()
                process.wait()
            text = (folder / "err").read_text()
        if pid != process.pid:
            if process.returncode != 5:
                wrong.append(f"exit code {process.returncode}")
            named = re.search(rf"\bpid {pid}\b", text, re.IGNORECASE)
            if named is None and not re.search(r"ddpbench: rank \d+ .*(killed|stopped|died)", text):
                wrong.append("nobody is named")
            elif named is None:
                wrong.append(f"pid {pid} is not named")
        left = [
            str(path) for path in (folder / "tmp").iterdir() if "torchinductor" not in path.name
        ]
        left += [f"/dev/shm/{name}" for name in shared if Path("/dev/shm", name).exists()]
        wrong += [f"{path} is left" for path in left]
        if wrong:
            wrong.append(f"pid {pid}, exit code {process.returncode}: {text[-1500:]}")
        return seconds, wrong


def _struck(process: subprocess.Popen[bytes], strike: Strike, order: random.Random) -> int | None:
    """Strike; whom, None where nobody was left."""
    for moment in (
        0.0,
        strike.when,
    ):  # from the first victim on, and between launches there is none
        time.sleep(moment)
        while not (victims := _victims(process.pid, strike.victim)):
            if process.poll() is not None:
                return None
            time.sleep(0.001)
    pid = order.choice(victims)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, strike.blow)
        return pid
    return None


def _victims(top: int, kind: str) -> list[int]:
    if kind == "parent":
        inner = [pid for pid, _ in _descendants(top) if "--paced" in _command(pid).split("\0")]
        return [top, *(pid for pid in inner if b"ddpbench-" not in _bytes(pid, "comm"))]
    found = []
    for pid, parent in _descendants(top):
        command, before = _command(pid), _command(parent)
        if kind == "mpirun" and ("prterun" in command or "mpirun" in command.split("\0")[0]):
            found.append(pid)
        launched = b"OMPI_COMM_WORLD_RANK=" in _bytes(pid, "environ")
        forked = command == before and command != "" and _bytes(pid, "comm")[:10] == b"ddpbench-r"
        if kind == "rank" and (launched or forked or b"LOCAL_RANK=" in _bytes(pid, "environ")):
            found.append(pid)
    return found


def _descendants(pid: int) -> Iterator[tuple[int, int]]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                yield int(child), pid
                yield from _descendants(int(child))


def _command(pid: int) -> str:
    return _bytes(pid, "cmdline").decode(errors="replace")


def _bytes(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _awaited(process: subprocess.Popen[bytes], token: str, seconds: float) -> list[str]:
    """What was not over in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None and not list_members(token):
            return []
        time.sleep(0.1)
    wrong = [f"{each.pid} {each.status()} {each.name()} is left" for each in list_members(token)]
    return [f"not over after {seconds:g} s", *wrong]


def list_members(token: str) -> list[psutil.Process]:
    """The living processes of a trial."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if each.environ().get(MARK) == token and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def main() -> int:
    """Strike as often as asked for; 0 where all went well."""
    count = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(10**6)
    commands = [word for word in sys.argv[3:] if word in COMMANDS] or list(COMMANDS)
    order, done, bad = random.Random(seed), 0, 0
    print(f"seed {seed}")
    while done < count:
        strike = draw(order, commands)
        if (result := try_strike(strike, order)) is None:
            continue
        seconds, wrong = result
        done += 1
        bad += bool(wrong)
        print(f"{done:3} {strike}: {seconds:.1f} s, {'; '.join(wrong) or 'right'}", flush=True)
    print(f"{done - bad} of {done} right")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
