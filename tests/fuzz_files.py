"""Damage stored files at random: each must be shown, or refused in one sentence.

python tests/fuzz_files.py --cases 10000 --seed 1

It damages runs of all three measuring commands, logs of other tools and Parquet files. It flips,
inserts and cuts bytes, replaces values of JSON by others of a wrong type or size, removes keys, and
puts a FIFO or a device in a file's place. It then runs a command that reads stored files. The same
seed makes the same damage.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from command_lines import ROOT
from fuzz_harness import Tally, fault_of, main, typed
from in_process import Outcome, call_in_process, forbid_processes

from ddpbench.present.writers import WRITERS
from ddpbench.records import store
from ddpbench.records.terminal_text import escape

# JSON texts: of every type, too large, too small, not finite, half characters, control characters.
VALUES = (
    "null", "true", "false", "0", "-1", "1", "3", "-0.0", "0.5", "1e400", "-1e400", "1e308",
    "1e99", "5e-324", "NaN", "Infinity", "9" * 5000, str(2** 63), str(2** 64 + 1),
    "-" + str(2** 63), '""', '"x"', '"\\ud800"', '"\\udcff"', '"\\u001b[2J\\u0007"',
    '"\\u202etxt"', '"a\\nb\\rc"', '"|"', '"µ ± …"', '"%s {}"', '"' + "x" * 3000 + '"', "[]", "{}",
    "[[]]", "[null]", "[0]", '["x"]', '{"x": 0}', "[1, 2, 3]", "[" * 60 + "]" * 60,
    "[" * 100_000 + "]" * 100_000, '{"x":' * 900 + "0" + "}" * 900, '"1970-01-01T00:00:00Z"',
    '"9999-99-99T99:99:99Z"', '"running"', '"gloo"', '"all_reduce"',
)  # fmt: skip
INSERTED = (
    *(b"\xff", b"\0", b"\x1b[31m", b"\xef\xbb\xbf", b"9" * 400, b"\r\n", b"-", b"\xed\xa0\x80"),
)
MARK = "@damage@"
NCCL_LOG = """\
# nccl-tests version 2.17.6 nccl-headers=22304 nccl-library=22304
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 1 iters: 20
# Using devices
#  Rank  0 Group  0 Pid    100 on node device  0 [0000:01:00] NVIDIA H200
#                                     out-of-place              in-place
#   size     count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#    (B) (elements)                      (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
    1024       256  float    sum    -1  10.00   0.10   0.10      0  11.00   0.09   0.09      0
    2048       512  float    sum    -1  12.00   0.17   0.17      0  12.50   0.16   0.16      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.13
"""
OSU_LOG = """\
# OSU MPI Allreduce Latency Test v7.4
# Datatype: MPI_CHAR.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
4                       2.00              1.50              2.50        1000
8                       2.50              1.75              3.50        1000
"""


def read_shortened_run(folder: Path, kept: int) -> dict[str, Any]:
    """Read a stored run and keep its first results only, which makes each try quick."""
    run: dict[str, Any] = json.loads((folder / "run.json").read_bytes())
    run["results"] = run.get("results", [])[:kept]
    return run


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON, the outermost first."""
    yield path
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from list_paths(item, (*path, key))


def mutate_run(rng: random.Random, run: dict[str, Any]) -> bytes:
    """Return the run as JSON after removing, repeating or replacing one to four of its values."""
    run = json.loads(json.dumps(run))
    texts = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(list_paths(run))
        *above, last = rng.choice(places[1:])
        parent: Any = run
        for key in above:
            parent = parent[key]
        action = rng.random()
        if action < 0.2:
            del parent[last]
        elif action < 0.3 and isinstance(parent, list):
            parent.append(parent[last])
        elif action < 0.4 and isinstance(parent, dict):
            parent[rng.choice(("", "x", "\x1b", "schema", "case"))] = parent.pop(last)
        else:
            parent[last] = MARK
            texts.append(rng.choice(VALUES))
    data = json.dumps(run)
    for text in texts:
        data = data.replace(f'"{MARK}"', text, 1)
    return data.encode()


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat or insert some bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at, end = sorted((rng.randrange(len(out) + 1), rng.randrange(len(out) + 1)))
        action = rng.randrange(6)
        if action == 0:
            del out[at:]
        elif action == 1:
            del out[at : min(end, at + 40)]
        elif action == 2:
            out[at:at] = rng.choice(INSERTED)
        elif action == 3:
            out[at:at] = out[at : min(end, at + 200)]
        elif out and at < len(out):
            out[at] = rng.randrange(256)
    return bytes(out)


def replace_file(rng: random.Random, path: Path) -> None:
    """Replace a file by something that is no ordinary file."""
    path.unlink()
    makers: tuple[Callable[[], object], ...] = (
        lambda: os.mkfifo(path), path.mkdir, path.touch, lambda: path.symlink_to(path),
        lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to("/dev/full"),
        lambda: path.symlink_to("/nowhere"), lambda: path.symlink_to("/proc/self/mem"),
    )  # fmt: skip
    rng.choice(makers)()


@contextlib.contextmanager
def working_folder() -> Iterator[list[dict[str, Any]]]:
    """Work in a temporary folder with sound runs in sound/; yield the runs to damage."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as back:
        back.callback(os.chdir, before)
        os.chdir(folder)
        reference = ROOT / "results/reference"
        runs = [
            read_shortened_run(reference / "cpu-2-ranks", 6),
            read_shortened_run(reference / "ddp-cpu-2-ranks", 0),
            json.loads((reference / "doctor-cpu-4-ranks/run.json").read_bytes()),
        ]
        for i, run in enumerate(runs):
            (Path("sound") / str(i)).mkdir(parents=True)
            (Path("sound") / str(i) / "run.json").write_text(json.dumps(run))
        shutil.copyfile(reference / "ddp-cpu-2-ranks/samples.parquet", "samples.parquet")
        yield runs


def choose_command(rng: random.Random, kind: int, stored: str) -> list[str]:
    """Choose a command that reads the stored file, which was made of the run number `kind`."""
    sound = f"sound/{min(kind, 2)}"
    sides = rng.sample((sound, stored), 2)
    judged = ["--format", rng.choice(("table", "csv", "json", "markdown"))]
    stated = ["--ranks", "2"]  # of logs that do not print it
    return rng.choice((
        ["show", stored, *stated, "--format", rng.choice(list(WRITERS))],
        ["show", stored, *stated, "--format", rng.choice(list(WRITERS))],
        ["show", stored, "--columns", rng.choice(("time,reason", "step", "place"))],
        ["list", "results"],
        ["compare", *sides, *stated, *judged],
        ["baseline", "save", "b", stored, "--replace"],
        ["baseline", "check", "b", sound, *judged],
    ))  # fmt: skip


def try_damaged_file(rng: random.Random, runs: list[dict[str, Any]]) -> tuple[list[str], Outcome]:
    """Damage one file and run one command on it; return the command and its outcome."""
    for name in ("results", "log.txt"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()
    folder, kind = Path("results/stored"), rng.randrange(5)
    folder.mkdir(parents=True)
    target = folder / "run.json"
    if kind < len(runs):
        mutated = mutate_run(rng, runs[kind])
        data = mutated if rng.random() < 0.7 else damage_bytes(rng, json.dumps(runs[kind]).encode())
    else:
        log = NCCL_LOG if kind == 3 else OSU_LOG
        target, data = Path("log.txt"), damage_bytes(rng, log.encode())
    target.write_bytes(data)
    if rng.random() < 0.05:
        replace_file(rng, target)
    words = choose_command(rng, kind, str(target.parent if kind < len(runs) else target))
    if words[:2] == ["baseline", "check"] and kind < len(runs):
        shutil.copytree(folder, "results/baselines/b", symlinks=True, copy_function=os.link)
    return words, call_in_process(words)


def try_damaged_samples(rng: random.Random) -> Outcome:
    """Read damaged raw samples; the outcome has code 3 if they are refused as an invalid run."""
    folder = Path("results/samples")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.parquet").write_bytes(
        damage_bytes(rng, Path("samples.parquet").read_bytes())
    )
    try:
        store.read_samples(folder)
    except store.InvalidRun as error:
        return Outcome(3, "", f"{escape(str(error))}\n")
    except Exception as error:
        return Outcome(1, "", f"Traceback: {error!r}")
    return Outcome(0, "", "")


def fuzz(rng: random.Random, cases: int) -> Tally:
    """Try so many damaged files."""
    tally = Tally()
    with working_folder() as runs, forbid_processes():
        for _ in range(cases):
            if rng.random() < 0.05:
                words, outcome = ["(samples.parquet)"], try_damaged_samples(rng)
            else:
                words, outcome = try_damaged_file(rng, runs)
            fault = fault_of(outcome) or find_unreadable_json(words, outcome)
            tally.add(typed(words), outcome, fault)
    return tally


def find_unreadable_json(words: list[str], outcome: Outcome) -> str | None:
    """Return a sentence on printed JSON that cannot be read, or None."""
    if outcome.code in (0, 1) and outcome.out and "json" in words:
        try:
            json.loads(outcome.out)
        except ValueError as error:
            return f"no JSON on stdout: {error}"
    return None


if __name__ == "__main__":
    main(__doc__.splitlines()[0], fuzz)
