"""Two variants of one measurement, launch by launch in randomised blocks of one each.

All of one before all of the other makes a drift of the machine read as a change (40 % false
verdicts in a simulation; 2 % by turns). Each variant is a command of its own with its own Python,
environment and options, which waits for its turn (`--paced`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ddpbench
from ddpbench.launch.placement import Refused
from ddpbench.nested.command_line import MEASURING, check, last_message, plan_cases
from ddpbench.records import redact, store
from ddpbench.session import options, run_folder

TAKEN = ("--launches", "--output", "--format", "--columns", "--quiet", "--seed")
PASSED_ON = (2, 4, 130)  # exit codes of a side that stay as they are; others mean that it died: 5
CHECK_SECONDS = 120.0  # for another Python to import torch and ddpbench
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Variant:
    """One side: its name, what it is run with, and the words of its own."""

    name: str
    python: str
    environ: Mapping[str, str]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.shown(self)

    def shown(self, other: Variant) -> str:
        """In words, without secrets: of these whether they are the other variant's too."""
        own = [] if self.python == sys.executable else ["--python", self.python]
        variables = []
        for name, value in self.environ.items():
            text = shlex.quote(redact.text(value))
            if redact.is_secret_name(name) or redact.HIDDEN in text:
                same = other.environ.get(name, value) == value
                text = "(hidden)" if same else "(hidden, differs)"
            variables.append(f"{name}={text}")
        return " ".join([*variables, shlex.join(redact.arguments([*own, *self.words]))]).strip()


class Failed(Exception):
    """One side could not be measured; the sentence names the side, its reason and its command."""

    def __init__(self, side: Side, reason: str, code: int) -> None:
        super().__init__(f"side {side.variant.name}: {reason}. Its command: {side.command}")
        self.code = code if code in PASSED_ON else 5


@dataclass(frozen=True)
class End:
    """Why measuring by turns ended before its time, and the exit code."""

    code: int
    sentence: str = ""


def add_measured(parser: argparse.ArgumentParser, results: str) -> None:
    """What is measured, by turns, and where it is stored."""
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="COMMAND …",
        help=f"what is measured: {' or '.join(MEASURING)}, and the options of it",
    )
    parser.add_argument("--seed", type=options.whole(0), help="of all orders; default: drawn")
    parser.add_argument("--output", metavar="FOLDER", help=f"default: a new one in {results}")


def measured_words(namespace: argparse.Namespace, usual: Sequence[str]) -> list[str]:
    """The command that is measured, without a `--` before it; where none was given, the usual."""
    words = list(namespace.words)
    return words[words[:1] == ["--"] :] or list(usual)


def prepared(
    namespace: argparse.Namespace, variants: Sequence[Variant], results: Path, label: str
) -> Path:
    """The folder for what is measured, after all that can be refused has been; and the seed.

    Raises Refused, or SystemExit with a sentence.
    """
    for each in variants:
        _check([*namespace.words, *each.words])
    for each in variants:
        _check_python(each)
    if getattr(namespace, "only", None):  # calibrate has none
        _check_only(namespace, variants)
    if namespace.seed is None:
        namespace.seed = random.SystemRandom().randrange(2**31)
    try:
        if namespace.output is None:
            return store.new_folder(label, results)
        folder = Path(namespace.output)
        folder.mkdir(parents=True, exist_ok=False)
    except OSError as error:
        raise Refused(run_folder.explain_unwritable(error)) from None
    return folder


def variant(name: str, text: str) -> Variant:
    """ "NAME=VALUE … --python PATH --option …" as a variant. Raises Refused where it is none."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Refused(f"--{name} {text!r} cannot be split into words: {error}") from None
    environ = {}
    while words and ASSIGNMENT.match(words[0]):
        key, _, value = words.pop(0).partition("=")
        environ[key] = value
    python = sys.executable
    if "--python" in words:
        at = words.index("--python")
        python = next(iter(words[at + 1 : at + 2]), "")
        if not (Path(python).is_file() and os.access(python, os.X_OK)):
            raise Refused(
                f"--{name} {text!r}: --python needs the path of a Python interpreter, "
                f"not {python!r}"
            )
        del words[at : at + 2]
    return Variant(name, python, environ, tuple(words))


class Side:
    """A variant's process while it measures, one launch a turn; its run grows in `folder`."""

    def __init__(
        self, variant: Variant, words: Sequence[str], folder: Path, settings: Sequence[str] = ()
    ) -> None:
        self.variant, self.folder = variant, folder
        self._words = [*words, *variant.words]
        self._errors = (folder.parent / f"{folder.name}.stderr").open("w+", errors="replace")
        self._process = subprocess.Popen(
            [variant.python, "-m", "ddpbench", *self._words, *settings, "--paced", "--quiet",
             "--output", str(folder)],
            env=_environ(variant),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            start_new_session=True,  # Ctrl-C reaches it once, from here
        )  # fmt: skip

    @property
    def command(self) -> str:
        """What measures this side alone, as one types it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variant.environ.items()]
        return " ".join([*variables, shlex.join([self.variant.python, "-m", "ddpbench",
                                                 *self._words])])  # fmt: skip

    def turn(self) -> None:
        """One launch. Raises Failed with the side's own sentence where it is refused or ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._errors.seek(0, os.SEEK_END)
        told = self._errors.tell()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        # What a module of the user's prints is passed over.
        code = next((int(line) for line in self._process.stdout if line.strip().isdigit()), None)
        if code == 0:
            return
        if code is None:  # it has ended, perhaps before its turn
            code, told = self._process.wait(60), 0
        self._errors.seek(told)
        raise Failed(self, last_message(self._errors.read()), code)

    def interrupt(self) -> None:
        """As Ctrl-C would: it stores what it has."""
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Let it finish its run, and wait for it; one that does not end is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.communicate(timeout=120)
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        kept = redact.text(self._errors.read())
        self._errors.seek(0)
        self._errors.truncate()
        self._errors.write(kept)
        self._errors.close()


@contextlib.contextmanager
def sides(
    variants: Sequence[Variant], namespace: argparse.Namespace, folder: Path, launches: int
) -> Iterator[list[Side]]:
    """The variants' processes, for at most so many launches each, ended together."""
    started: list[Side] = []
    settings = ["--launches", str(launches), "--seed", str(namespace.seed)]
    try:
        for each in variants:
            side = Side(each, namespace.words, folder / each.name, settings)
            started.append(side)  # at once: it is to be ended even where the next cannot begin
        yield started
    except KeyboardInterrupt:
        for side in started:
            side.interrupt()
        raise
    finally:
        for side in started:
            side.close()
        show_progress("")


def block(started: Sequence[Side], order: random.Random) -> None:
    """One launch of each, in random order. Raises Failed where one fails."""
    for side in order.sample(started, len(started)):
        side.turn()


def wrong(started: Sequence[Side]) -> End | None:
    """How it ended where a side that has been closed found its results wrong."""
    for side in started:
        run = store.read(side.folder)
        if run.exit_code == 4:
            errors = [each.sentence for each in run.findings if each.severity == "error"]
            failed = Failed(side, next(iter(errors), "a result was wrong"), 4)
            return End(failed.code, str(failed))
    return None


def show_progress(progress: str) -> None:
    """Where it stands, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Kddpbench: {progress}")
        sys.stderr.flush()


def _environ(variant: Variant) -> dict[str, str]:
    """What a variant's process runs with; where its Python has no ddpbench, it takes this one."""
    package = str(Path(ddpbench.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **variant.environ}


def _check_python(variant: Variant) -> None:
    """Raises Refused where another Python cannot import what a measurement needs."""
    if variant.python == sys.executable:
        return
    word = "ddpbench can run"
    try:
        done = subprocess.run(
            [variant.python, "-c", f"import torch, ddpbench.cli; print({word!r})"],
            env=_environ(variant), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=CHECK_SECONDS, check=False,
        )  # fmt: skip
        lines = done.stderr.strip().splitlines() or ["it is no Python interpreter"]
        reason = None if word in done.stdout else lines[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason is not None:
        raise Refused(
            f"--{variant.name} {str(variant)!r}: {variant.python} cannot run ddpbench: {reason}; "
            "choose the python of an environment in which torch is installed"
        )


def _check_only(namespace: argparse.Namespace, variants: Sequence[Variant]) -> None:
    """Raises Refused where no case that will be measured has one of the texts in its name."""
    from ddpbench.render.labels import label  # loads numpy

    names: list[str] = []
    for each in variants:
        cases = None
        if each.python == sys.executable:
            cases = plan_cases([*namespace.words, *each.words])
        if cases is None:
            return  # known once it is measured
        names += map(label, cases)
    if not any(text.lower() in name.lower() for text in namespace.only for name in names):
        raise Refused(
            f"--only {','.join(namespace.only)}: no case that would be measured has that in its "
            f"name, as in {names[0]!r}"
        )


def _check(words: Sequence[str]) -> None:
    """Refuse a typo before anything is started. Raises Refused, or SystemExit with its sentence."""
    name = next(iter(words), "")
    if name not in MEASURING:
        raise Refused(f"{name!r} measures nothing: write {' or '.join(MEASURING)}, and its options")
    for word in words:
        if word.split("=")[0] in TAKEN:
            raise Refused(f"{word} is not to be given here: it is set for both sides")
    check(words)
