"""Compare checkpoints of torch.distributed.checkpoint by digests of their whole tensors.

python -m ddpbench checkpoint step-1000 resharded-1000      two folders, saved on any meshes
python -m ddpbench checkpoint step-1000 step-1000.json      a folder, and the file of a StateDigest
python -m ddpbench checkpoint step-1000 --save step-1000.json

It reads one tensor after another in one process. It ends with 0 if both hold the same state, and
with 4 if not. As torch does, it unpickles parts of a checkpoint: compare only those that you trust.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ddpbench.records.store import InvalidRun
from ddpbench.records.wording import counted

if TYPE_CHECKING:
    from ddpbench.replicas import StateDigest

T = TypeVar("T")
GROUP = "diagnose"
HELP = "prove that checkpoints hold the same state, saved on whatever mesh"
SHOWN = 20  # differences
STATE = ("model.", "optim.")  # names of a StateDigest; a checkpoint may hold more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; imports no torch."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder of a checkpoint")
    parser.add_argument(
        "other",
        metavar="OTHER",
        type=Path,
        nargs="?",
        help="the folder of another checkpoint, or a file that StateDigest.save or --save wrote "
        "(default: nothing is compared)",
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        type=Path,
        help="write the digests of FOLDER to this file (default: not written)",
    )


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Print what differs; return the exit code. Raises InvalidRun for what cannot be read."""
    digest = _read(namespace.folder)
    size = f"{counted(len(digest.tensors), 'tensor')} and {counted(len(digest.values), 'value')}"
    if namespace.save:
        digest.save(namespace.save)
    if namespace.other is None:
        sys.stdout.write(f"{namespace.folder}: {size}\n")
        return 0
    other = _read(namespace.other)
    if namespace.other.is_file():
        digest = _choose(digest, other)
    differences = digest.differences(other)
    if not differences:
        sys.stdout.write(f"equal: {size} of {namespace.folder} and {namespace.other}\n")
        return 0
    more = len(differences) - SHOWN
    lines = [
        f"DIFFERENT: {counted(len(differences), 'difference')}; here is {namespace.folder}, the "
        f"other state {namespace.other}",
        *differences[:SHOWN],
        *([f"and {more} more"] if more > 0 else []),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 4


def _read(path: Path) -> StateDigest:
    """Return the digests of a checkpoint or in a file. Raises InvalidRun with one sentence."""
    from ddpbench.replicas.checkpoint_digest import digest_checkpoint
    from ddpbench.replicas.state_digest import StateDigest

    try:
        return StateDigest.load(path) if path.is_file() else digest_checkpoint(path)
    except (OSError, ValueError) as error:
        raise InvalidRun(str(error)) from None


def _choose(digest: StateDigest, other: StateDigest) -> StateDigest:
    """Return the part of a checkpoint that digest_state names, under the names of a StateDigest.

    A checkpoint of {"app": {"model": …}} has "app." before each name, and may hold more than the
    state of model and optimizer.
    """
    first = next(iter(other.tensors), "")
    prefixes = [name.removesuffix(first) for name in digest.tensors if name.endswith(f".{first}")]
    prefix = "" if first in digest.tensors else min(prefixes, default="", key=len)

    def choose(table: dict[str, T], wanted: dict[str, T]) -> dict[str, T]:
        named = {name.removeprefix(prefix): each for name, each in table.items()}
        return {k: v for k, v in named.items() if k in wanted or k.startswith(STATE)}

    return replace(
        digest,
        tensors=choose(digest.tensors, other.tensors),
        values=choose(digest.values, other.values),
    )
