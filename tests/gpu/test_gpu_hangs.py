"""Hangs of two ranks of nccl, with torch's flight recorder."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import clean_environment
from frozen import Frozen, verdict_facts
from gpu_machine import Machine
from patience import PATIENCE_SECONDS

from ddpbench.launch import placement

SCRIPT = Path(__file__).with_name("gpu_hangs.py")
# The verdict on rank 1.
VERDICTS = {
    "late": r"rank 1\b.* load_batch \(gpu_hangs\.py:\d+\)",
    "skipped": r"rank 1\b.*(calls|never joined)",
    "stopped": r"rank 1\b.* is stopped \(SIGSTOP\)",
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_hang_is_blamed_on_rank_1(
    machine: Machine, tmp_path: Path, name: str, frozen: Frozen
) -> None:
    """Rank 1 is late before DDP(), skips an all_reduce, or is stopped: rank 0 ends with exit code 5
    and names rank 1 in a line."""
    variables = {**machine.two_ranks, "TORCH_FR_BUFFER_SIZE": "2000", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    variables["MASTER_PORT"] = str(placement.free_port())
    words = [sys.executable, str(SCRIPT), name, machine.device, machine.backend]
    paths = [tmp_path / f"rank{rank}" for rank in range(2)]
    ranks = []
    for rank, path in enumerate(paths):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"rank-{rank}"}
        with path.open("w") as output:
            environ = clean_environment(**variables, **own)
            ranks.append(subprocess.Popen(words, env=environ, stdout=output, stderr=output))
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[0].wait(PATIENCE_SECONDS)
    finally:
        code = ranks[0].poll()
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.wait()
    texts = [path.read_text() for path in paths]
    print(name, *texts, sep="\n")
    verdicts = re.findall(r"^ddpbench: (.*)$", texts[0], re.MULTILINE)
    matching = [verdict for verdict in verdicts if re.search(VERDICTS[name], verdict)]
    assert matching
    frozen.facts([code, verdict_facts(matching[0])["blamed"]])
