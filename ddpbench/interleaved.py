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
from ddpbench import options, session
from ddpbench.measuring import MEASURING, checked
from ddpbench.records import redact, store
from ddpbench.runtime.launch import Refused

TAKEN = ("--launches", "--output", "--format", "--columns", "--quiet", "--seed")
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
            if redact.secret_name(name) or redact.HIDDEN in text:
                same = other.environ.get(name, value) == value
                text = "(hidden)" if same else "(hidden, differs)"
            variables.append(f"{name}={text}")
        return " ".join([*variables, shlex.join(redact.words([*own, *self.words]))]).strip()


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


def prepared(
    namespace: argparse.Namespace, variants: Sequence[Variant], results: Path, label: str
) -> Path:
    """The folder for what is measured, after all that can be refused has been; and the seed.

    Raises Refused, or SystemExit with a sentence.
    """
    for each in variants:
        _check([*namespace.words, *each.words])
    if namespace.seed is None:
        namespace.seed = random.SystemRandom().randrange(2**31)
    try:
        if namespace.output is None:
            return store.new_folder(label, results)
        folder = Path(namespace.output)
        folder.mkdir(parents=True, exist_ok=False)
    except OSError as error:
        raise Refused(session.cannot_write(error)) from None
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
        if not os.access(python, os.X_OK):
            raise Refused(
                f"--{name} {text!r}: --python needs the path of a Python interpreter, "
                f"not {python!r}"
            )
        del words[at : at + 2]
    return Variant(name, python, environ, tuple(words))


class Side:
    """A variant's process while it measures, one launch a turn; its run grows in `folder`."""

    def __init__(self, variant: Variant, words: Sequence[str], folder: Path) -> None:
        self.variant, self.folder = variant, folder
        package = str(Path(ddpbench.__file__).parents[1])  # where its Python has none, this one
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        self._errors = (folder.parent / f"{folder.name}.stderr").open("w+", errors="replace")
        self._process = subprocess.Popen(
            [variant.python, "-m", "ddpbench", *words, *variant.words, "--paced", "--quiet",
             "--output", str(folder)],
            env={**os.environ, "PYTHONPATH": path, **variant.environ},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            start_new_session=True,  # Ctrl-C reaches it once, from here
        )  # fmt: skip

    def turn(self) -> int:
        """One launch; its exit code. Raises Refused with its own sentence where it refuses."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        said = self._process.stdout.readline().strip()
        code = int(said) if said.isdigit() else self._process.wait(60)
        if code == 2:
            raise Refused(f"--{self.variant.name} {str(self.variant)!r}: {self.last_words()}")
        return code

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines() or ["it ended without a word"]
        return lines[-1].removeprefix("ddpbench: ")

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
            side = Side(each, [*namespace.words, *settings], folder / each.name)
            started.append(side)  # at once: it is to be ended even where the next cannot begin
        yield started
    except KeyboardInterrupt:
        for side in started:
            side.interrupt()
        raise
    finally:
        for side in started:
            side.close()
        tell("")


def block(started: Sequence[Side], order: random.Random) -> int:
    """One launch of each, in random order; the first exit code that is not 0."""
    for side in order.sample(started, len(started)):
        if (code := side.turn()) != 0:
            return code
    return 0


def tell(progress: str) -> None:
    """Where it stands, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Kddpbench: {progress}")
        sys.stderr.flush()


def _check(words: Sequence[str]) -> None:
    """Refuse a typo before anything is started. Raises Refused, or SystemExit with its sentence."""
    name = next(iter(words), "")
    if name not in MEASURING:
        raise Refused(f"{name!r} measures nothing: write {' or '.join(MEASURING)}, and its options")
    for word in words:
        if word.split("=")[0] in TAKEN:
            raise Refused(f"{word} is not to be given here: it is set for both sides")
    checked(words)
