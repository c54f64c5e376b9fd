"""Ranks that no launcher starts."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from command_lines import run_command
from patience import PATIENCE_SECONDS

from ddpbench.launch.placement import free_port


def run_by_hand(
    folder: Path, ranks: int, words: list[str], **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command in each rank with the variables of `env://`; return how each ended."""
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables["WORLD_SIZE"] = str(ranks)

    def run(rank: str) -> subprocess.CompletedProcess[str]:
        place = {"RANK": rank, "LOCAL_RANK": rank}
        return run_command(words, folder, 2 * PATIENCE_SECONDS, **variables, **place)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, map(str, range(ranks))))
