"""Ranks that no launcher starts."""

import subprocess
from pathlib import Path

from command_lines import clean_environment
from patience import PATIENCE_SECONDS

from ddpbench.launch.placement import free_port


def run_by_hand(
    folder: Path, ranks: int, words: list[str], **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command in each rank with the variables of `env://`; return how each ended."""
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            words,
            cwd=folder,
            env=clean_environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), **variables
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    texts = [process.communicate(timeout=2 * PATIENCE_SECONDS) for process in started]
    return [
        subprocess.CompletedProcess(words, process.returncode, *text)
        for process, text in zip(started, texts, strict=True)
    ]
