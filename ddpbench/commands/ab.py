"""Measure two variants in turns, launch by launch, until the verdict is clear.

ddpbench ab --a "OMP_NUM_THREADS=1" --b "OMP_NUM_THREADS=2" ddp --workload mlp
ddpbench ab --a "" --b "--python /new/bin/python" collectives --sizes 4K,1M
ddpbench ab --a "--bucket-cap-mb 25" --b "--bucket-cap-mb 100" ddp -n 4
ddpbench ab --a "--backend gloo" --b "--backend mpi" ddp --workload mlp

A variant has up to three parts, in this order: environment variables (NAME=VALUE), --python PATH
(another Python environment: this ddpbench runs with the torch there), and options of COMMAND that
change how it does the same thing. Options for both sides belong after COMMAND.

Launches come in randomised blocks of one launch per variant. The pairs are judged after 6, 12, 24
and 48 blocks, with intervals of 96.8, 99, 99.5 and 99.75 %, so that at most 5 % of all verdicts are
false although ddpbench looks several times. The two runs are stored in results/…-ab-…/a and /b.
The exit codes are those of `compare`, with a as BASE and b as NEW. If a variant fails, the
exit code is 5, or the variant's own 2, 4 or 130.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ddpbench.commands import compare
from ddpbench.launch.placement import Refused, read_placement
from ddpbench.nested_runs import turns
from ddpbench.nested_runs.command_line import MEASURING
from ddpbench.nested_runs.turns import Variant
from ddpbench.present.progress import Progress
from ddpbench.present.writers import WRITERS
from ddpbench.records import store
from ddpbench.records.store import InvalidRun
from ddpbench.records.terminal_text import tell
from ddpbench.records.wording import list_choices
from ddpbench.session import options

if TYPE_CHECKING:
    from ddpbench.verdicts.comparison import Comparison

USUAL = "collectives"  # the command to measure if none is given
GROUP = "compare"
HELP = "measure two variants in turns until the verdict is clear"
# Blocks, and the confidence of the look after them: 3.2 + 1 + 0.5 + 0.25 % false verdicts at most.
# The look after the first block finds only what cannot be compared.
LOOKS = ((1, 0.95), (6, 0.968), (12, 0.99), (24, 0.995), (48, 0.9975))
LEAST_BLOCKS = 6
# Variants may differ in how the same thing is done, but not in what is done or what a time means.
VARIED = ("threads", *chain.from_iterable(turns.HOW.values()))  # OMP_NUM_THREADS sets the threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = (
        'NAME=VALUE …, --python PATH, and options of the command; "" for no changes '
        "(write --a=--async for a single word that begins with -)"
    )
    parser.add_argument("--a", required=True, metavar="VARIANT", help=f"BASE: {what}")
    parser.add_argument("--b", required=True, metavar="VARIANT", help="NEW, in the same form")
    parser.add_argument(
        "--max-time",
        type=options.positive,
        default=900.0,
        metavar="SECONDS",
        help=f"longest time for all launches; the first {LEAST_BLOCKS} blocks always run, however "
        "long they take (default: 900)",
    )
    compare.add_judging(parser, margin_percent=3.0)
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="COMMAND …",
        help=f"command to measure: {list_choices(MEASURING)}, with its options (default: {USUAL})",
    )
    parser.add_argument(
        "--seed", type=options.whole(0), metavar="N", help="seed of all orders (default: random)"
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="folder for the two runs (default: a new one in results/)",
    )


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure both variants, store and print the comparison; return the exit code.

    If a side fails, the comparison of what was measured is printed. Raises Refused and InvalidRun.
    """
    if read_placement() is not None:
        raise Refused("ab starts its ranks itself: type ddpbench ab … -n N, without a launcher")
    typed = list(namespace.words)
    namespace.words = typed[typed[:1] == ["--"] :] or [USUAL]
    variants = [turns.parse_variant(name, getattr(namespace, name)) for name in ("a", "b")]
    folder = turns.prepare(namespace, variants)
    began, confidence = time.monotonic(), LOOKS[0][1]

    from ddpbench.verdicts.verdict import INCONCLUSIVE  # loads numpy

    def measure_blocks(measure_block: Callable[[], None]) -> None:
        nonlocal confidence
        done = 0
        for blocks, level in LOOKS:
            spent = time.monotonic() - began
            if done >= LEAST_BLOCKS and spent * blocks / done > namespace.max_time:
                return
            for number in range(done, blocks):
                progress.describe(f"block {number + 1}, judged after {blocks}")
                measure_block()
                progress.advance()
            done, confidence = blocks, level
            if INCONCLUSIVE not in _compare(namespace, variants, folder, confidence).counts:
                return

    bar = Progress("ab", LOOKS[-1][0], sys.stderr.isatty())
    with contextlib.closing(bar) as progress:
        end = turns.measure(namespace, variants, folder, LOOKS[-1][0], measure_blocks)
    code = 0
    try:
        code = _show(_compare(namespace, variants, folder, confidence), namespace, folder)
    except (InvalidRun, Refused):
        if end is None:  # else results can be missing
            raise
    if end is not None and end.reason:
        tell(end.reason)
    tell(f"stored in {folder}")
    return code if end is None else end.code


def _show(comparison: Comparison, namespace: argparse.Namespace, folder: Path) -> int:
    """Store and print the comparison; return the exit code."""
    from ddpbench.present.changes import build_document

    document = build_document(comparison)
    for form, suffix in (("json", "json"), ("table", "txt")):
        store.replace_file(folder / f"comparison.{suffix}", WRITERS[form](document).encode())
    return compare.show(comparison, namespace)


def _compare(
    namespace: argparse.Namespace, variants: Sequence[Variant], folder: Path, confidence: float
) -> Comparison:
    """Compare what has been measured so far, in pairs."""
    from ddpbench.verdicts.comparison import Rule
    from ddpbench.verdicts.matching import Source

    base, new = (
        Source(
            f"{variant.name}: {str(variant) or '(no changes)'}",
            (store.read(folder / variant.name),),
            (folder / variant.name,),
        )
        for variant in variants
    )
    rule = Rule(
        namespace.margin / 100,
        paired=True,
        confidence=confidence,
        varied=VARIED,
        allow_missing=namespace.allow_missing,
    )
    return compare.compare_cases(base, new, rule, namespace.only)
