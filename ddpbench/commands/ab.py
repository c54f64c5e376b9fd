"""Measure two variants in turns, launch by launch, until the verdict is clear.

python -m ddpbench ab --a "OMP_NUM_THREADS=1" --b "OMP_NUM_THREADS=2" ddp --workload mlp
python -m ddpbench ab --a "" --b "--python /new/bin/python" collectives --sizes 4K,1M
python -m ddpbench ab --a "--bucket-cap-mb 25" --b "--bucket-cap-mb 100" ddp -n 4
python -m ddpbench ab --a "--backend gloo" --b "--backend mpi" ddp --workload mlp

A variant has up to three parts, in this order: environment variables (NAME=VALUE), --python PATH
(another Python environment: this ddpbench runs with the torch there), and options of COMMAND that
change how it does the same thing. Variants that do different things (dtype, size, number of ranks)
are INCOMPARABLE.

Launches come in randomised blocks of one launch per variant. The first two only show how long
launches should be to narrow the interval most, unless COMMAND has --slice, --seconds or --rounds;
they are stored, but not judged. The pairs are judged after 6, 12, 24
and 48 blocks, with intervals of 96.8, 99, 99.5 and 99.75 %, so that at most 5 % of all verdicts are
false although ddpbench looks several times. The two runs are stored in results/…-ab-…/a and /b.
The exit codes are those of `compare`, with a as BASE and b as NEW. If a variant fails, the
exit code is 5, or the variant's own 2, 4 or 130.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddpbench.commands import compare
from ddpbench.nested_runs import turns
from ddpbench.nested_runs.turns import Budget, Variant
from ddpbench.records import store
from ddpbench.session import options
from ddpbench.session.progress import open_progress

if TYPE_CHECKING:
    from ddpbench.records.schema import Run
    from ddpbench.verdicts.comparison import Comparison

GROUP = "compare"
HELP = "measure two variants in turns until the verdict is clear"
# Blocks, and the confidence of the look after them: 3.2 + 1 + 0.5 + 0.25 % false verdicts at most.
LOOKS = ((6, 0.968), (12, 0.99), (24, 0.995), (48, 0.9975))
LEAST_BLOCKS = turns.FIRST + LOOKS[0][0]
PLANNED = 12  # blocks for which the time should suffice: six give wide intervals
# Variants may differ in how the same thing is done, but not in what is done or what a time means.
VARIED = (
    "backend", "provider", "form", "in_place", "async_op", "buffers",
    "bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters",
    "comm_hook", "amp", "threads", "prefetch", "reshard_after_forward",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; imports no torch."""
    what = 'NAME=VALUE …, --python PATH, and options of the command; "" for no changes'
    parser.add_argument("--a", required=True, metavar="VARIANT", help=f"BASE: {what}")
    parser.add_argument("--b", required=True, metavar="VARIANT", help="NEW, in the same form")
    parser.add_argument(
        "--budget",
        type=options.positive,
        default=900.0,
        metavar="SECONDS",
        help=f"longest time for all launches; the first {LEAST_BLOCKS} blocks always run, however "
        "long they take (default: 900)",
    )
    compare.add_judging(parser, margin_percent=3.0)
    turns.add_measured(parser)


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure both variants, store and print the comparison; return the exit code.

    If a side fails, what was measured is printed all the same. Raises Refused and InvalidRun.
    """
    variants = [turns.parse_variant(name, getattr(namespace, name)) for name in ("a", "b")]
    folder = turns.prepare(namespace, variants)
    confidence, launches = LOOKS[0][1], turns.FIRST + LOOKS[-1][0]
    typed = [*namespace.words, *(word for variant in variants for word in variant.words)]
    fixed = any(word.split("=")[0] in turns.DURATIONS for word in typed)
    budget = Budget(namespace.budget, fixed)

    def measure_blocks(measure_block: Callable[[float], None]) -> None:
        nonlocal confidence
        done, pace = 0, 0.0
        progress.describe("first blocks: find out how long launches should be")
        for blocks, level in ((0, confidence), *LOOKS):
            if done and not budget.fits(blocks - done, pace):
                return
            for number in range(done, blocks or turns.FIRST):
                if blocks:
                    progress.describe(f"block {number + 1}, judged after {blocks}")
                budget.measure(measure_block, pace)
                progress.advance(1)
            done, confidence = blocks, level
            comparison = _compare(namespace, variants, folder, confidence)
            if _is_clear(comparison):
                return
            pace = budget.choose(comparison, max(PLANNED, 2 * done) - done)

    def show() -> int:
        return _store_and_show(namespace, _compare(namespace, variants, folder, confidence), folder)

    with open_progress("ab", launches) as progress:
        end = turns.measure(namespace, variants, folder, launches, measure_blocks)
    return turns.conclude(folder, end, show)


def _is_clear(comparison: Comparison) -> bool:
    from ddpbench.verdicts.verdict import INCONCLUSIVE

    return INCONCLUSIVE not in comparison.counts


def _store_and_show(namespace: argparse.Namespace, comparison: Comparison, folder: Path) -> int:
    from ddpbench.render import comparison as render

    store.replace_file(folder / "comparison.json", render.as_json(comparison).encode())
    store.replace_file(folder / "comparison.txt", render.table(comparison).encode())
    return compare.show(comparison, namespace)


def _compare(
    namespace: argparse.Namespace, variants: Sequence[Variant], folder: Path, confidence: float
) -> Comparison:
    from ddpbench.verdicts.comparison import Rule
    from ddpbench.verdicts.matching import Source

    base, new = (
        Source(
            f"{variant.name}: {variant.describe(other) or '(no changes)'}",
            (_without_first(store.read(folder / variant.name)),),
            (folder / variant.name,),
        )
        for variant, other in zip(variants, reversed(variants), strict=True)
    )
    rule = Rule(namespace.margin / 100, paired=True, confidence=confidence, varied=VARIED)
    return compare.compared(base, new, rule, namespace.only)


def _without_first(run: Run) -> Run:
    """Return the run without its first launches, which have another length than the others."""
    if len(run.launches) <= turns.FIRST:
        return run
    return replace(
        run,
        launches=tuple(each for each in run.launches if each.index >= turns.FIRST),
        results=tuple(each for each in run.results if each.launch >= turns.FIRST),
        steps=tuple(each for each in run.steps if each.launch >= turns.FIRST),
    )
