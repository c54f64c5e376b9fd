"""Compare two environments that have ddpbench and another torch each, installed with pip.

    python tests/perf/two_torches.py /envs/before/bin/python /envs/after/bin/python

`ab --python`, `compare` of stored runs and the pytest plugin compare the two as they are, then with
5 ms added to each all_reduce of the second one, through a sitecustomize in its site-packages. One
line per comparison: exit code, verdicts, and whether the output names both versions of torch. Exits
with 1 if a comparison misses the slow-down, alarms without it, or does not name both versions. The
second environment must not have a sitecustomize of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CASE = ("collectives", "--op", "all_reduce", "--sizes", "64K", "--backend", "gloo", "-n", "2")
SLOWED = """
import sys, time
if any("ddpbench" in word or "pytest" in word for word in sys.orig_argv):
    import torch.distributed as dist
    plain = dist.all_reduce
    def all_reduce(*arguments, **named):
        time.sleep(0.005)
        return plain(*arguments, **named)
    dist.all_reduce = all_reduce
"""
TESTS = """
def test_all_reduce(collective_benchmark):
    collective_benchmark("all_reduce", "64K", backend="gloo", ranks=2)
"""
# Not those of a launcher, nor of a checkout: both environments have what pip installed.
ENVIRON = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}


def call(python: str, *words: str) -> tuple[int, str]:
    """Run a module of a Python; return its exit code, and stdout and stderr together."""
    done = subprocess.run(
        [python, "-m", *words],
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout


def read(python: str, expression: str) -> str:
    """Return the value of an expression in a Python."""
    words = [python, "-c", f"import sysconfig, torch; print({expression})"]
    return subprocess.check_output(words, env=ENVIRON, text=True).strip()


@contextlib.contextmanager
def slowed(python: str) -> Iterator[None]:
    """Delay each all_reduce of an environment by 5 ms meanwhile."""
    path = Path(read(python, "sysconfig.get_path('purelib')")) / "sitecustomize.py"
    with path.open("x") as file:
        file.write(SLOWED)
    try:
        yield
    finally:
        path.unlink()


def compare_all(base: str, new: str, name: str) -> dict[str, tuple[int, str]]:
    """Compare two Pythons in three ways; return exit code and output of each."""
    for python, side in ((base, "base"), (new, "new")):
        code, text = call(python, "ddpbench", *CASE, "--output", f"{name}-{side}")
        assert code == 0, text
    plugin = ("pytest", "-q", "-p", "no:cacheprovider", "test_torches.py")
    call(base, *plugin, f"--benchmark-storage={name}", "--benchmark-autosave")
    return {
        "ab": call(base, "ddpbench", "ab", "--budget", "60", "--margin", "10", "--a", "", "--b",
                   f"--python {new}", *CASE),
        "compare": call(base, "ddpbench", "compare", f"{name}-base", f"{name}-new"),
        "pytest": call(new, *plugin, f"--benchmark-storage={name}", "--ddpbench-compare"),
    }  # fmt: skip


def main() -> int:
    """Compare as they are and slowed; print a line for each."""
    base, new = sys.argv[1:]
    versions = [read(python, "torch.__version__") for python in (base, new)]
    print("torch", " → ".join(versions), flush=True)
    failures = 0
    os.chdir(tempfile.mkdtemp(prefix="two-torches-"))
    Path("test_torches.py").write_text(TESTS)
    for name, planted in (("equal", False), ("slowed", True)):
        with slowed(new) if planted else contextlib.nullcontext():
            ends = compare_all(base, new, name)
        for way, (code, text) in ends.items():
            found = re.findall(r"\d+ (?:SLOWER|FASTER|SAME|INCONCLUSIVE|INCOMPARABLE)", text)
            found = list(dict.fromkeys(found))
            named = all(version in text for version in versions)
            right = (code == 1 and "1 SLOWER" in found) if planted else code == 0
            failures += not (right and named)
            print(f"{name:<7} {way:<8} exit {code}, {', '.join(found) or 'no verdict'}, "
                  f"{'names both' if named else 'DOES NOT NAME BOTH'}", flush=True)  # fmt: skip
            if not (right and named):
                print(text, flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
