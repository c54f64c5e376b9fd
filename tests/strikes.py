"""Stop and kill processes of ddpbench at random moments.

Every command that starts ranks must end in time, name the process it lost, and leave nothing.

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
from dataclasses import dataclass
from pathlib import Path

import psutil
from command_lines import clean_environment
from patience import PATIENCE_SECONDS

# Healthy ranks start, meet and go on within this deadline, even where much else runs.
TIMEOUT_SECONDS = 20
MARK = "DDPBENCH_STRIKE"  # an environment variable of all processes that a trial starts
NAMED = re.compile(r"ddpbench: (side [ab]: )?rank \d+ .*(killed|stopped|died)")
CACHE = f"torchinductor_{getpass.getuser()}"
SWEEP = ("collectives", "--op", "all_reduce", "--sizes", "4,1K", "--case-time", "0.3")
STEPS = ("ddp", "--workload", "mlp", "--width", "16", "--depth", "2", "--rounds", "3")
DOCTOR = ("doctor", "--only", "preflight,stragglers", "--case-time", "3")
COMMANDS = {
    "collectives": (*SWEEP, "--launches", "2"),
    "ddp": (*STEPS, "--no-breakdown"),
    "doctor": DOCTOR,
    "ab": ("ab", "--a", "X=1", "--b", "X=2", *SWEEP),
}


@dataclass(frozen=True)
class Strike:
    """A signal to a process of a command.

    victim: "rank", or the process that starts ranks, "mpirun" or "parent". when: seconds after the
    first such process has started.
    """

    command: str
    backend: str
    blow: signal.Signals
    victim: str
    when: float

    def __str__(self) -> str:
        blow = self.blow.name
        return f"{self.command} on {self.backend}: {blow} to {self.victim} at {self.when:.3f} s"


def choose_strike(rng: random.Random, commands: list[str]) -> Strike:
    """Choose a strike; its moment is log-uniform from 1 ms to 8 s."""
    command = rng.choice(commands)
    backend = rng.choice(["gloo", "mpi"])
    blow = rng.choice([signal.SIGSTOP, signal.SIGKILL])
    victim = "rank" if rng.random() < 0.8 else "mpirun" if backend == "mpi" else "parent"
    if victim == "parent":
        blow = signal.SIGKILL  # one that is stopped goes on when it is continued: Ctrl-Z
    return Strike(command, backend, blow, victim, 10 ** rng.uniform(-3, 0.9))


def try_strike(strike: Strike, rng: random.Random) -> tuple[float, list[str]] | None:
    """Return the seconds from strike to end, and what went wrong; None if the strike came late."""
    with tempfile.TemporaryDirectory(prefix="strike-") as name:
        folder, token = Path(name), uuid.uuid4().hex
        (folder / "tmp").mkdir()
        words = [*COMMANDS[strike.command], "--backend", strike.backend, "--device", "cpu"]
        words += ["--timeout", str(TIMEOUT_SECONDS), "-n", "2"]
        with (folder / "err").open("w+") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "ddpbench", *words], cwd=folder, start_new_session=True,
                env=clean_environment(**{MARK: token, "TMPDIR": str(folder / "tmp")}),
                stdout=subprocess.DEVNULL, stderr=err,
            )  # fmt: skip
            try:
                pid = _strike(process, strike, rng)
                struck = time.monotonic()
                if pid is None:
                    assert process.returncode == 0, (folder / "err").read_text()
                    return None
                shared = {path.name for path in (folder / "tmp").rglob("ddpbench-*")}
                faults = _wait_for_end(process, token, TIMEOUT_SECONDS + PATIENCE_SECONDS)
                seconds = time.monotonic() - struck
            finally:
                for each in list_members(token):
                    each.kill()
                process.wait()
            text = (folder / "err").read_text()
        if pid != process.pid:
            if process.returncode != 5:
                faults.append(f"exit code {process.returncode}")
            named = re.search(rf"\bpid {pid}\b", text, re.IGNORECASE)
            if named is None and not re.search(NAMED, text):
                faults.append("no process is named")
            elif named is None:
                faults.append(f"pid {pid} is not named")
        left = [
            str(path) for path in (folder / "tmp").iterdir() if "torchinductor" not in path.name
        ]
        left += [f"/dev/shm/{name}" for name in shared if Path("/dev/shm", name).exists()]
        faults += [f"{path} is left" for path in left]
        if faults:
            faults.append(f"pid {pid}, exit code {process.returncode}: {text[-1500:]}")
        return seconds, faults


def _strike(process: subprocess.Popen[bytes], strike: Strike, rng: random.Random) -> int | None:
    """Send the signal; return the pid of the victim, or None if the command had ended."""
    for moment in (0.0, strike.when):  # count from the first victim; between launches there is none
        time.sleep(moment)
        while not (victims := _list_victims(process.pid, strike.victim)):
            if process.poll() is not None:
                return None
            time.sleep(0.001)
    pid = rng.choice(victims)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, strike.blow)
        return pid
    return None


def _list_victims(top: int, kind: str) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(top).children(recursive=True)
        victims = [each.pid for each in descendants if _is_victim(each, kind)]
        return [top, *victims] if kind == "parent" else victims
    return []


def _is_victim(process: psutil.Process, kind: str) -> bool:
    """Return whether a process is a rank, mpirun, or a side of `ab`, which starts ranks as well."""
    with contextlib.suppress(psutil.Error, OSError):
        name, command = process.name(), process.cmdline()
        if kind == "parent":
            return "--paced" in command and not name.startswith("ddpbench-")
        if kind == "mpirun":
            return any(program in word for word in command[:1] for program in ("mpirun", "prterun"))
        return name.startswith("ddpbench-r") or "OMPI_COMM_WORLD_RANK" in process.environ()
    return False


def _wait_for_end(process: subprocess.Popen[bytes], token: str, seconds: float) -> list[str]:
    """Wait for the end of all processes; return what is left after `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None and not list_members(token):
            return []
        time.sleep(0.1)
    faults = [f"{each.pid} {each.status()} {each.name()} is left" for each in list_members(token)]
    return [f"not over after {seconds:g} s", *faults]


def list_members(token: str) -> list[psutil.Process]:
    """Return the living processes of a trial."""
    processes = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if each.environ().get(MARK) == token and each.status() != psutil.STATUS_ZOMBIE:
                processes.append(each)
    return processes


def main() -> int:
    """Strike as often as the first argument demands; return 1 if anything went wrong."""
    count = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(10**6)
    commands = [word for word in sys.argv[3:] if word in COMMANDS] or list(COMMANDS)
    rng, done, failed = random.Random(seed), 0, 0
    print(f"seed {seed}")
    while done < count:
        strike = choose_strike(rng, commands)
        if (result := try_strike(strike, rng)) is None:
            continue
        seconds, faults = result
        done += 1
        failed += bool(faults)
        print(f"{done:3} {strike}: {seconds:.1f} s, {'; '.join(faults) or 'right'}", flush=True)
    print(f"{done - failed} of {done} right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
