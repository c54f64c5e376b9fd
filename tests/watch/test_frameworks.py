"""Real Accelerate, Lightning, Hugging Face Trainer and Ray Train on the CPU, watched.

DDPBENCH_FRAMEWORKS_PYTHON=/path/to/python pytest -m frameworks

That Python has torch, ddpbench's dependencies, and any of accelerate, lightning, transformers and
ray[train]. Without the variable, the tests are skipped: a start of a framework takes ten seconds.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from command_lines import clean_environment
from patience import PATIENCE_SECONDS

from ddpbench.records import store
from ddpbench.records.watched import COLUMNS

PYTHON = os.environ.get("DDPBENCH_FRAMEWORKS_PYTHON", "")
SCRIPTS = Path(__file__).parent / "frameworks"
TORCHRUN = (
    "-m", "torch.distributed.run", "--nproc-per-node", "2",
    "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
)  # fmt: skip
WATCH = ("-m", "ddpbench.watch", "--output", "results")
# Ray would write a token to the user's home folder, and report its use.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip
OWN = ("forward", "backward", "optimizer", "input")

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.thorough,
    pytest.mark.skipif(not PYTHON, reason="DDPBENCH_FRAMEWORKS_PYTHON names no Python"),
]


def run(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the Python that has the frameworks."""
    return subprocess.run(
        [PYTHON, *words], cwd=cwd, env=clean_environment(**ENVIRONMENT),
        capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False,
    )  # fmt: skip


def require(cwd: Path, module: str) -> None:
    """Skip the test if that Python does not have the framework."""
    if run(cwd, "-c", f"import importlib.util as u; exit(not u.find_spec({module!r}))").returncode:
        pytest.skip(f"{module} is not installed for {PYTHON}")


def losses(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The exact loss that a script printed at its end."""
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("loss ")]


def assert_seen(results: Path, steps: int) -> None:
    """Assert that the only run in a folder has all steps of its job with all their phases."""
    (folder,) = store.list_runs(results)
    found = store.read(folder).steps[0].watched
    assert found is not None
    assert found.last_step == steps - 1  # they count from 0
    seconds = dict(zip(COLUMNS, found.median_seconds, strict=True))
    assert all(seconds[name] > 0 for name in OWN), seconds
    assert sum(seconds.values()) == pytest.approx(found.step_seconds, rel=0.5)


@pytest.mark.parametrize(
    ("module", "steps"), [("accelerate", 30), ("lightning", 40), ("transformers", 40)]
)
def test_an_unmodified_script(tmp_path: Path, module: str, steps: int) -> None:
    """A script of the framework under `torchrun -m ddpbench.watch` ends with the same code and
    loss as without; all its optimizer steps are seen on both ranks, with all their phases."""
    require(tmp_path, module)
    script = str(SCRIPTS / f"with_{module}.py")
    plain = run(tmp_path, *TORCHRUN, script)
    seen = run(tmp_path, *TORCHRUN, *WATCH, script)
    assert losses(seen) == losses(plain)
    assert len(losses(plain)) == 1
    assert_seen(tmp_path / "results", steps)


def test_one_line_in_ray_train(tmp_path: Path) -> None:
    """`ddpbench.watch()` in the train function of Ray Train sees the steps of all workers."""
    require(tmp_path, "ray")
    results = tmp_path / "results"
    (tmp_path / "storage").mkdir()
    done = run(tmp_path, str(SCRIPTS / "with_ray.py"), str(results), str(tmp_path / "storage"))
    assert len(losses(done)) == 1
    assert_seen(results, 40)
