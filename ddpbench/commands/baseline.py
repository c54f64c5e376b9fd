"""Save runs to compare with later, in a plain folder in results/baselines/ that you can commit.

ddpbench baseline save before                    the last run
ddpbench baseline save before RUN RUN RUN …      several runs, pooled: five show the drift
ddpbench baseline check before                   repeat its measurement, and compare
ddpbench baseline check before last --margin 5   compare with a stored run

Measure what you save with --launches 6 or more. A check takes the options of `compare` and ends
with its exit codes. If measuring fails, it ends with the exit code of the measuring.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpbench.commands import compare
from ddpbench.launch import placement
from ddpbench.launch.placement import Refused
from ddpbench.nested_runs import command_line
from ddpbench.records import redact, store
from ddpbench.records.schema import Run
from ddpbench.records.store import BASELINES, InvalidRun
from ddpbench.records.terminal_text import tell
from ddpbench.records.wording import counted, explain_unknown

if TYPE_CHECKING:
    from ddpbench.verdicts.matching import Source

GROUP = "compare"
HELP = "save runs to compare with later; measure again and compare"
FEWEST = 6  # launches; of analysis.stats, which loads numpy
# Facts that distinguish machines. A hostname does not: a container may have a new one each time.
MACHINE = ("cpu_model", "cores_logical", "cores_physical", "gpu_name")
FILES = ("run.json", "table.csv", "table.txt")
# Options of a measuring command that a new measurement sets itself.
RESET = ("-n", "--ranks", "--launches", "--output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="save|check", required=True)
    save = actions.add_parser("save", help="copy runs", description="Copy runs.")
    save.add_argument("name", metavar="NAME", help="name of the baseline")
    runs = f"{compare.WHERE}; five show the drift (default: last)"
    save.add_argument("runs", metavar="RUN", nargs="*", default=["last"], help=runs)
    save.add_argument("--replace", action="store_true", help="replace the baseline of this name")
    about = "compare with a baseline"
    check = actions.add_parser("check", help=about, description="Compare with a baseline.")
    check.add_argument("name", metavar="NAME", help="name of the baseline")
    again = f"{compare.WHERE}; default: run the baseline's command again"
    check.add_argument("new", metavar="NEW", nargs="?", help=again)
    compare.add_judging(check)


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Save or check; return the exit code. Raises Refused and InvalidRun."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", namespace.name) or namespace.name == "last":
        raise Refused(
            f"invalid baseline name {namespace.name!r}: use letters, digits and . _ + -, beginning "
            "with a letter or digit; `last` is taken"
        )
    return _save(namespace) if namespace.action == "save" else _check(namespace)


def _save(namespace: argparse.Namespace) -> int:
    target = BASELINES / namespace.name
    if target.exists() and not namespace.replace:
        raise Refused(f"a baseline {namespace.name} exists: add --replace, or choose another name")
    folders = [*dict.fromkeys(each for name in namespace.runs for each in store.find_runs(name))]
    source = compare.read_side(", ".join(namespace.runs), folders)
    with store.refuse_impossible_values(source.name):
        fewest = _require_sound(source)
    try:
        _copy(folders, target)
    except OSError as error:
        raise Refused(f"{target} cannot be written ({error.strerror})") from None
    size = f"{counted(len(folders), 'run')}, {counted(fewest, 'launch')} of each case"
    sys.stdout.write(f"saved {target}: {size}\n")
    return 0


def _require_sound(source: Source) -> int:
    """Return the number of launches of the case that has fewest.

    Raises InvalidRun if a run is incomplete or a result is invalid.
    """
    from ddpbench.present.case_labels import name_case
    from ddpbench.verdicts import matching

    for run in source.runs:
        if run.state != "complete":
            raise InvalidRun(f"{run.id} is {run.state}, and cannot be a baseline: measure it again")
    try:
        found = matching.find_cases(source)
    except ValueError as error:
        raise InvalidRun(str(error)) from None
    for case, each in found.items():
        if each.fault is not None:
            raise InvalidRun(
                f"{source.name} cannot be a baseline: {name_case(case)}: {each.fault}. Find the "
                "cause, then measure again"
            )
    launches = [len(each.side.times) for each in found.values() if each.side is not None]
    if not launches:
        raise InvalidRun(f"{source.name} cannot be a baseline: it has no measured case")
    return min(launches)


def _copy(folders: Sequence[Path], target: Path) -> None:
    """Copy FILES of the runs, then remove the earlier content of the target.

    Each of several runs has a folder of its own.
    """
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        for folder in folders:
            place = fresh / folder.name if len(folders) > 1 else fresh
            place.mkdir(parents=True)
            for name in FILES:
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, place / name)
        if target.exists():
            shutil.rmtree(target)
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _check(namespace: argparse.Namespace) -> int:
    folder = BASELINES / namespace.name
    if not folder.is_dir():
        known = sorted(each.name for each in BASELINES.glob("[!.]*"))
        raise Refused(
            explain_unknown("baseline", namespace.name, known)
            if known
            else f"unknown baseline {namespace.name!r}: type ddpbench baseline save NAME RUN"
        )
    base = compare.read_side(f"baseline {namespace.name}", store.find_runs(str(folder)))
    if namespace.new is not None:
        return _compare(namespace, base, namespace.new)
    if placement.read_placement() is not None:
        raise Refused("a check without NEW starts its own ranks: type it without a launcher")
    code, target = _measure(namespace.name, base.runs)
    if code not in (0, 1, 4):  # the run is not complete
        return code
    return _compare(namespace, base, str(target))


def _compare(namespace: argparse.Namespace, base: Source, name: str) -> int:
    new = compare.read_side(name, store.find_runs(name))
    comparison = compare.compare_stored(base, new, namespace)
    code = compare.show(comparison, namespace)
    changed = [
        f"{each.name}: {', '.join(each.base)} → {', '.join(each.new)}"
        for each in comparison.differences
        if each.name in MACHINE
    ]
    if not changed:
        return code
    tell(
        f"{base.name} was measured on another machine ({'; '.join(changed)}), so nothing is "
        "decided: save a baseline on this machine, or type ddpbench compare"
    )
    return 3


def _measure(name: str, runs: Sequence[Run]) -> tuple[int, Path]:
    """Repeat the measurement of these runs; return the exit code and the folder of the new run.

    Tables go to stderr, since stdout is for the comparison. A folder that stays empty is removed.
    """
    words = _again(runs[0])
    try:
        target = store.new_folder(f"{runs[0].command}-check-{name}")
    except OSError as error:
        raise Refused(store.explain_unwritable(error)) from None
    words += ["--output", str(target)]
    typed = shlex.join(["python", "-m", "ddpbench", *redact.arguments(words)])
    tell(f"measuring again: {typed}")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return command_line.run(words), target
    finally:
        with contextlib.suppress(OSError):
            target.rmdir()


def _again(run: Run) -> list[str]:
    """Return the command line that repeats the measurement of a run on this host.

    Raises Refused if there is none.
    """
    hosts = {str(rank.get("hostname")) for each in run.launches for rank in each.ranks}
    known = run.command_line[:1] == ("ddpbench",) and len(hosts) == 1
    if not known or redact.HIDDEN in " ".join(run.command_line):
        raise Refused(
            f"{run.id} cannot be measured again by one command: it needs several hosts, another "
            "program or a secret. Measure in the same way, then: ddpbench baseline check NAME RUN"
        )
    kept, rest = [], iter(run.command_line[1:])
    for word in rest:
        word = re.sub(r"(^|[=,])~(?=/)", lambda at: at[1] + str(Path.home()), word)
        option, equals, _ = word.partition("=")
        if option in RESET:
            if not equals:
                next(rest, None)  # its value
        elif not re.fullmatch(r"-n\d+", word):
            kept.append(word)
    launches = Counter(launch.backend for launch in run.launches)
    count = max(FEWEST, *launches.values())
    return [*kept, "-n", str(run.launches[0].world_size), "--launches", str(count)]
