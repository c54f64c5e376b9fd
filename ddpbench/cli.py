"""The front door: names the commands, checks what was asked, starts ranks where no launcher did.

python -m ddpbench collectives -n 4 --backend gloo,mpi
python -m ddpbench ddp -n 4 --workload mlp
python -m ddpbench doctor -n 4
python -m ddpbench launch --hosts hosts.txt -- collectives
python -m ddpbench slurm -N2 -n4
python -m ddpbench compare BASE NEW
python -m ddpbench ab --a "NAME=1" --b "NAME=2" collectives --op all_reduce
python -m ddpbench calibrate
python -m ddpbench baseline check NAME
python -m ddpbench history CASE
python -m ddpbench show RUN
python -m ddpbench list
python -m ddpbench guide hangs
"""

from __future__ import annotations

import argparse
import errno
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from ddpbench import __version__, collectives, ddp
from ddpbench.catalog import backends
from ddpbench.commands import ab, baseline, calibrate, compare, guide, history, manifest, slurm
from ddpbench.commands import launch as launch_node
from ddpbench.doctor import command as doctor
from ddpbench.interchange import sources
from ddpbench.interchange.log import Hints
from ddpbench.launch import forks, placement, starters
from ddpbench.launch.placement import Placement, Refused
from ddpbench.launch.supervise import Deadline
from ddpbench.records import store
from ddpbench.records.store import InvalidRun
from ddpbench.records.visible import escape, prepare_streams, silence_stdout, tell
from ddpbench.render.collective_columns import COLUMNS
from ddpbench.render.column import UnknownColumn
from ddpbench.render.doctor import FINDING_COLUMNS
from ddpbench.render.formats import FORMATS
from ddpbench.render.step_columns import STEP_COLUMNS
from ddpbench.runtime.control import first_line
from ddpbench.selftest import command as selftest
from ddpbench.session import options, run_folder
from ddpbench.session.run_options import RunOptions

T = TypeVar("T", bound=RunOptions)


@dataclass(frozen=True)
class Command:
    """A command: its help, its options, what it does with them and the words they came from."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Sequence[str]], int]
    description: str | None = None
    passes_on: bool = False  # its words are for other programs, --help in front excepted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code, as listed in the guide, chapter results."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    try:
        try:
            return _main(words)
        finally:
            sys.stdout.flush()
    except Refused as error:
        options.speak(str(error), options.placement_if_clear(), error.speaker)
        return 2
    except InvalidRun as error:
        tell(str(error))
        return 3
    except BrokenPipeError:
        silence_stdout()  # its reader has gone (`| head`)
        return 0
    except (OSError, ImportError, MemoryError) as error:
        silence_stdout()
        options.speak(_cannot(error), options.placement_if_clear(), 0)
        return 2
    except KeyboardInterrupt:
        return 130


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"ddpbench {__version__}\n")
        return 0
    name, rest = words[0], words[1:]
    command = COMMANDS.get(name)
    if command is None:
        options.refuse(
            f"unknown command {name!r}{options.did_you_mean(name, COMMANDS)} "
            f"(there are: {', '.join(COMMANDS)})"
        )
    parser = options.Parser(
        prog=f"ddpbench {name}", description=command.description or command.help
    )
    command.add_arguments(parser)
    own = rest[:1] if rest[:1] in (["-h"], ["--help"]) else []
    return command.run(parser.parse_args(own if command.passes_on else rest), rest)


def _cannot(error: Exception) -> str:
    """The sentence for what this machine refuses: a file, a full disk, memory."""
    name = getattr(error, "filename", None)
    if name is None and getattr(error, "errno", None) in (errno.EBADF, errno.EIO, errno.ENOSPC):
        name = "stdout"
    if isinstance(error, OSError) and name is not None:
        return f"{name} cannot be read or written: {error.strerror}"
    return f"{type(error).__name__}: {first_line(error)}"


def _overview() -> str:
    width = max(map(len, COMMANDS))
    groups = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {c.help}" for name, c in commands.items())])
        for title, commands in GROUPS.items()
    )
    return (
        f"ddpbench {__version__}: benchmark and diagnose PyTorch's distributed collectives\n\n"
        f"usage: ddpbench COMMAND [options]\n\n{groups}\n\n"
        "Show the options of a command: ddpbench COMMAND --help\n"
    )


def _measuring(
    kind: type[T], run: Callable[[T, Placement], int]
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    """What a measuring command does: in a rank its part, elsewhere starting the ranks."""

    def called(namespace: argparse.Namespace, words: Sequence[str]) -> int:
        asked = kind.of(namespace)
        options.require_columns(asked.format, asked.columns)
        place = placement.read_placement()
        placement.require_limits(place.world_size if place else asked.nproc or 2, place)
        for module in asked.modules:
            try:
                import_module(module)
            except (ImportError, TypeError, ValueError) as error:
                raise Refused(f"--import {module}: {error}") from None
        asked = resolve(asked, place)
        asked.check()
        if place is not None:
            return run(asked, place)
        return start(replace(asked, nproc=_nproc(asked)), words)

    return called


def resolve(asked: T, place: Placement | None) -> T:
    """The options with device and backends decided. Raises Refused when one cannot be had."""
    device = backends.choose_device(asked.backend, asked.device)
    names = backends.choose(asked.backend, device, place.launcher if place else None)
    launches = asked.launches or (asked.usual_launches if place is None else 1)
    if place is not None and launches > 1:
        raise Refused(
            "--launches needs ddpbench to start the ranks: leave out the launcher and type python "
            f"-m ddpbench {asked.command} -n {place.world_size} --launches {launches} …"
        )
    return replace(asked, device=device, backend=names, launches=launches)


def _nproc(asked: RunOptions) -> int:
    """How many ranks to start here: what was asked for, else one a GPU, else two."""
    if asked.nproc is not None or asked.device == "cpu":
        return asked.nproc or 2
    import torch

    return torch.cuda.device_count()


def start(asked: RunOptions, words: Sequence[str]) -> int:
    """Start the ranks of every launch, each backend's by its launcher; then show the run."""
    from ddpbench.session import run_end

    if asked.master_port is not None:
        placement.require_free(asked.master_port)
    assert asked.nproc is not None
    try:
        folder = run_folder.create_run(asked, asked.nproc, words)
    except OSError as error:
        raise Refused(run_folder.explain_unwritable(error)) from None
    end, refusals = None, 0
    failed = set[str]()  # backends: what ended or refused one launch does so to the next
    for number, name in _schedule(asked, store.read(folder).plan.seed):
        if name in failed:
            continue
        if asked.paced and not sys.stdin.readline():
            tell("stdin has ended before the last launch")
            break
        code, verdict = _launch(asked, words, name, folder, number)
        if asked.paced:
            sys.stdout.write(f"{code}\n")
            sys.stdout.flush()
        refusals += code == 2
        if code == 130:
            end = run_end.interrupted("a signal")  # unless the ranks have told which
            break
        if code != 0:
            failed.add(name)
            reason = verdict or f"the ranks on {name} ended with exit code {code}"
            end = end or run_end.End("failed", reason, 5)
    nothing = refusals or not store.read(folder).launches
    if nothing and run_end.discard(folder):
        return 2 if refusals or end is None else end.code
    return run_end.finish(folder, asked.format, asked.columns, asked.quiet, end)


def _schedule(asked: RunOptions, seed: int) -> Iterator[tuple[int, str]]:
    """The launches in their order: in randomised blocks of one a backend, drift meets all alike."""
    order, launches = random.Random(seed), asked.launches or 1
    for block in range(launches):
        names = list(asked.backend)
        if launches > 1:
            order.shuffle(names)
        for name in names:
            yield block * len(names) + asked.backend.index(name), name


def _launch(
    asked: RunOptions, words: Sequence[str], name: str, folder: Path, number: int
) -> tuple[int, str]:
    """One backend's ranks, started and awaited; their exit code, and what was told from here of one
    that was killed or stopped."""
    own = ["--backend", name, "--device", asked.device, "--join", str(folder)]
    own += ["--launch", str(number), "--launches", "1"]
    if sys.stderr.isatty():
        own.append("--progress")
    verdicts: list[str] = []

    def say(verdict: str) -> None:
        tell(verdict)
        verdicts.append(verdict)

    deadline = Deadline(asked.timeout, asked.watchdog == "end", say)
    starter, nproc = backends.get(name).launcher, asked.nproc or 1
    if asked.device == "cpu" and starter == "torchrun":
        line = [asked.command, *words, *own]
        code = forks.run(lambda: main(line), nproc, deadline=deadline)
    else:
        line = ["-m", f"ddpbench.{asked.command}", *words, *own]
        code = starters.STARTERS[starter](line, nproc, deadline)
    return code, next(iter(verdicts), "")


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        help="a folder, a name in results/, `last`, or a log of nccl-tests, rccl-tests or OSU",
    )
    options.add_logs(parser)
    options.add_shown(parser, [*COLUMNS, *STEP_COLUMNS, *FINDING_COLUMNS])


def _show(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    options.require_columns(namespace.format, namespace.columns)
    run = sources.read(sources.find(namespace.run), Hints(namespace.op, namespace.ranks))
    try:
        with store.showing(namespace.run):
            text = FORMATS[namespace.format](run, namespace.columns, namespace.quiet)
    except UnknownColumn as error:
        raise Refused(str(error)) from None
    sys.stdout.write(text)
    return 0


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="results", help="default results")


def _list(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    from tabulate import tabulate

    rows = []
    for folder in store.runs(Path(namespace.folder)):
        try:
            run = store.read(folder)
        except InvalidRun as error:
            tell(str(error))
            continue
        backend = ",".join(dict.fromkeys(launch.backend for launch in run.launches))
        world = run.launches[0].world_size if run.launches else None
        measured = sum(outcome.summary is not None for outcome in run.outcomes)
        of = ",".join(run.operations[:3]) + (",…" if len(run.operations) > 3 else "")
        words_of_run = map(escape, (folder.name, run.command, of, backend))
        rows.append([*words_of_run, world, measured, escape(run.state), run.exit_code])
    if not rows:
        tell(f"no runs in {namespace.folder}/")
        return 0
    heads = ["run", "command", "of", "backends", "ranks", "cases", "state", "exit"]
    sys.stdout.write(tabulate(rows, heads) + "\n")
    return 0


def _doctor(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    if namespace.selftest is not None:
        return selftest.run(namespace, words)
    if namespace.healthy is not None:
        raise Refused("--healthy is for --selftest: python -m ddpbench doctor --selftest")
    return _measuring(doctor.Options, doctor.run)(namespace, words)


def _baseline(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    return baseline.run(namespace, words, main)


# The commands by the purpose under which --help lists them.
GROUPS: dict[str, dict[str, Command]] = {
    "measure": {
        "collectives": Command(
            collectives.HELP,
            collectives.add_arguments,
            _measuring(collectives.Options, collectives.run),
            collectives.__doc__,
        ),
        "ddp": Command(ddp.HELP, ddp.add_arguments, _measuring(ddp.Options, ddp.run), ddp.__doc__),
        "launch": Command(
            launch_node.HELP, launch_node.add_arguments, launch_node.run, launch_node.__doc__
        ),
        "slurm": Command(slurm.HELP, slurm.add_arguments, slurm.run, slurm.__doc__, passes_on=True),
        "manifest": Command(manifest.HELP, manifest.add_arguments, manifest.run, manifest.__doc__),
    },
    "diagnose": {
        "doctor": Command(doctor.HELP, doctor.add_arguments, _doctor, doctor.__doc__),
    },
    "compare": {
        "compare": Command(compare.HELP, compare.add_arguments, compare.run, compare.__doc__),
        "ab": Command(ab.HELP, ab.add_arguments, ab.run, ab.__doc__),
        "calibrate": Command(
            calibrate.HELP, calibrate.add_arguments, calibrate.run, calibrate.__doc__
        ),
        "baseline": Command(baseline.HELP, baseline.add_arguments, _baseline, baseline.__doc__),
        "history": Command(history.HELP, history.add_arguments, history.run, history.__doc__),
    },
    "results": {
        "show": Command("print a stored run again", _show_arguments, _show),
        "list": Command("the runs in results/", _list_arguments, _list),
    },
    "manual": {
        "guide": Command(guide.HELP, guide.add_arguments, guide.run, guide.__doc__),
    },
}
COMMANDS: dict[str, Command] = {
    name: command for commands in GROUPS.values() for name, command in commands.items()
}
