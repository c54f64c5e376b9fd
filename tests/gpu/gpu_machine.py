"""The machine of the GPU checks, and how commands run there.

python -m pytest -m gpu                                  on a machine with a GPU
DDPBENCH_GPU_REHEARSAL=1 python -m pytest -m gpu         without a GPU: the same checks with the
                                                         CPU and gloo, to test the checks
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_lines import ddpbench_command, run_command
from patience import PATIENCE_SECONDS

REHEARSAL = "DDPBENCH_GPU_REHEARSAL"
UNITS = Path(__file__).with_name("gpu_units.py")
# With few blocks each, the kernels of two ranks fit on one GPU at once. --share-gpu does the rest.
SHARING = {"NCCL_MAX_CTAS": "4", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Machine:
    """CUDA tensors on nccl, or in a rehearsal CPU tensors on gloo."""

    device: str
    backend: str
    gpus: int

    @property
    def rehearsal(self) -> bool:
        return self.device == "cpu"

    @property
    def two_ranks(self) -> dict[str, str]:
        """The variables with which two ranks of the backend run here."""
        return {} if self.rehearsal or self.gpus > 1 else SHARING

    def run(self, cwd: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `ddpbench WORDS…` on the device, until it ends; print what it prints."""
        command = [*ddpbench_command(*words), "--device", self.device]
        done = run_command(command, cwd, 2 * PATIENCE_SECONDS, **variables)
        print(f"$ ddpbench {' '.join(command[3:])}\n{done.stdout}{done.stderr}")
        return done


def read_facts(device: str) -> dict[str, Any]:
    """Return torch's facts about the devices, from another process."""
    words = [sys.executable, str(UNITS), "facts", device]
    done = run_command(words, UNITS.parent)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))
