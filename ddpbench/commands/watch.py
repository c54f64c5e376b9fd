"""Start a training script on this host and watch it: who is slow, in which phase, on which link.

ddpbench watch -n 4 train.py --epochs 3
Under a launcher, put the watch before the script:
torchrun --nproc-per-node 4 -m ddpbench.watch train.py --epochs 3
mpirun -n 4 python -m ddpbench.watch train.py
srun -n 4 python -m ddpbench.watch -m mypackage.train
In the script itself, in every rank: ddpbench.watch()

All options before the script belong to ddpbench, all after it to the script. The exit code is that
of the script, except with --verify (4, 1) and --timeout (5).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddpbench.launch import scripts
from ddpbench.launch.placement import read_placement
from ddpbench.watch import command

GROUP = "diagnose"
HELP = "watch any training script: who is slow, in which phase, on which link"
PASSES_ON = True  # what follows the script is the script's
add_arguments = command.add_arguments


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Start the ranks of a script and wait for them; in a rank of a launcher, become the script.

    Returns the highest exit code, 5 for a rank that a signal ended. Raises Refused.
    """
    request = command.parse(words, "ddpbench watch")
    line = [sys.executable, "-m", "ddpbench.watch", *words]
    if read_placement() is not None:
        os.execv(sys.executable, line)
    with tempfile.NamedTemporaryFile() as note:
        os.environ[command.NOTE] = note.name
        end = scripts.run_on_host(line, request.ranks or command.usual_ranks())
        folder = Path(note.name).read_text()
    if folder:
        from ddpbench.watch import stored

        stored.correct_end(Path(folder), end)
    return end.code
