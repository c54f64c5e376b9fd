"""Measure two variants in turns, in blocks of one launch each.

If all launches of one came before those of the other, a drift of the machine would look like a
change (40 % false verdicts in a simulation; 2 % in turns). Each variant is a separate command with
its own Python, environment and options, which waits for its turn before each launch (`--paced`).
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
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ddpbench
from ddpbench.launch.placement import Refused
from ddpbench.nested_runs.command_line import MEASURING, last_message, parse
from ddpbench.records import redact, store
from ddpbench.records.store import End
from ddpbench.session.options import resolve

SET_HERE = ("--launches", "--output", "--format", "--columns", "--quiet", "--seed")
# Options of a variant: how the same thing is done, and the fields of a case that they set.
HOW: dict[str, tuple[str, ...]] = {
    "--import": (),
    "--backend": ("backend", "provider"),
    "--form": ("form",),
    "--place": ("in_place",),
    "--async": ("async_op",),
    "--bucket-cap-mb": ("bucket_cap_mb",),
    "--gradient-as-bucket-view": ("gradient_as_bucket_view",),
    "--static-graph": ("static_graph",),
    "--find-unused-parameters": ("find_unused_parameters",),
    "--no-broadcast-buffers": ("broadcast_buffers",),
    "--comm-hook": ("comm_hook",),
    "--amp": ("amp",),
    "--no-prefetch": ("prefetch",),
    "--reshard-after-forward": ("reshard_after_forward",),
}
PASSED_ON = (2, 4, 130)  # exit codes of a side that stay as they are; others mean that it died: 5
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=(?!=)")


@dataclass(frozen=True)
class Variant:
    """One side: its name, its Python and environment, and its own options."""

    name: str
    python: str
    environ: Mapping[str, str]
    words: tuple[str, ...]

    def __str__(self) -> str:
        """Return the variant as typed, without its secrets."""
        python = [] if self.python == sys.executable else ["--python", self.python]
        return self.format_command([*python, *self.words])

    def format_command(self, words: Sequence[str]) -> str:
        """Return these words after this variant's variables, without secrets."""
        variables = []
        for name, value in self.environ.items():
            hidden = redact.is_secret_name(name)
            variables.append(f"{name}={'(hidden)' if hidden else shlex.quote(redact.text(value))}")
        return " ".join([*variables, shlex.join(redact.arguments(words))]).strip()


def parse_variant(name: str, text: str) -> Variant:
    """Return the variant of "NAME=VALUE … --python PATH --option …". Raises Refused."""
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
                f"--{name} {text!r}: {python or 'the path'} after --python is not the path of an "
                "existing Python interpreter"
            )
        del words[at : at + 2]
    if words and not words[0].startswith("-"):
        raise Refused(
            f"--{name} {text!r}: {words[0]!r} is neither NAME=VALUE nor an option. Write "
            f'--{name} "NAME=VALUE", --{name} "--python PATH" or --{name} "--option value"'
        )
    return Variant(name, python, environ, tuple(words))


def prepare(namespace: argparse.Namespace, variants: Sequence[Variant]) -> Path:
    """Validate the request, choose a seed, and create the output folder.

    Raises Refused, or SystemExit with a sentence.
    """
    for variant in variants:
        words = [*namespace.words, *variant.words]
        for word in words:
            if word.split("=")[0] in SET_HERE:
                raise Refused(f"leave out {word}: ddpbench sets it for both sides")
        parsed = parse(words)
        options = MEASURING[words[0]].Options.of(parsed)
        if variant.python == sys.executable:
            resolve(options, None)
        else:  # another Python may have another device and backend
            options.check()
        for word in variant.words:
            if word.startswith("-") and word.split("=")[0] not in HOW:
                raise Refused(f"--{variant.name}: {word} belongs after the command, for both sides")
    if namespace.seed is None:
        namespace.seed = random.SystemRandom().randrange(2**31)
    try:
        if namespace.output is None:
            return store.new_folder("ab")
        folder = Path(namespace.output)
        folder.mkdir(parents=True, exist_ok=False)
    except OSError as error:
        raise Refused(store.explain_unwritable(error)) from None
    return folder


class Failed(Exception):
    """A side could not be measured; the sentence names the side, the reason and the command."""

    def __init__(self, side: Side, reason: str, code: int) -> None:
        super().__init__(f"side {side.variant.name}: {reason}. Next: run {side.command}")
        self.code = code if code in PASSED_ON else 5


class Side:
    """The process that measures a variant, one launch per block; its run grows in `folder`."""

    def __init__(
        self, variant: Variant, words: Sequence[str], folder: Path, settings: Sequence[str] = ()
    ) -> None:
        self.variant, self.folder = variant, folder
        self._line = [variant.python, "-m", "ddpbench", *words, *variant.words]
        # Its folder contains ddpbench alone, because pip puts ddpbench beside torch.
        self._package = tempfile.TemporaryDirectory(prefix="ddpbench-package-")
        (Path(self._package.name) / "ddpbench").symlink_to(Path(ddpbench.__file__).resolve().parent)
        environ = {**os.environ, **variant.environ}
        paths = filter(None, (self._package.name, environ.get("PYTHONPATH")))
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*self._line, *settings, "--quiet", "--output", str(folder)],
            env={**environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # Ctrl-C reaches it once, from here
        )

    @property
    def command(self) -> str:
        """The command that measures this side alone, without secrets."""
        return self.variant.format_command(self._line)

    def measure_launch(self) -> None:
        """Measure one launch. Raises Failed with the process's message if it fails."""
        start = self._errors.seek(0, os.SEEK_END)
        with contextlib.suppress(BrokenPipeError):
            print("go", file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        # A module of the user may print to stdout too.
        code = next((int(line) for line in self._process.stdout if line.strip().isdigit()), None)
        if code != 0:
            if code is None:  # the process has ended, perhaps before its turn
                code, start = self._process.wait(60), 0
            self._errors.seek(start)
            raise Failed(self, last_message(self._errors.read()), code)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Let the process finish its run; kill it if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.communicate(timeout=120)
        self._process.kill()
        self._process.wait()
        self._errors.close()
        self._package.cleanup()


def measure(
    namespace: argparse.Namespace,
    variants: Sequence[Variant],
    folder: Path,
    launches: int,
    measure_blocks: Callable[[Callable[[], None]], None],
) -> End | None:
    """Start a process for each variant and measure blocks; return how it ended, if early.

    launches: per variant, at most. measure_blocks: its argument is a function for one block.
    """
    order = random.Random(namespace.seed)
    settings = ["--launches", str(launches), "--seed", str(namespace.seed), "--paced"]
    sides: list[Side] = []

    def measure_block() -> None:
        for side in order.sample(sides, len(sides)):
            side.measure_launch()

    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: what was measured is shown
        signal.signal(number, signal.default_int_handler)
    try:
        # One by one: a side must be closed even if the next one cannot start.
        sides.extend(Side(v, namespace.words, folder / v.name, settings) for v in variants)
        measure_blocks(measure_block)
    except KeyboardInterrupt:
        for side in sides:
            side.interrupt()
        return End("interrupted", None, 130)
    except Failed as error:
        return End("failed", str(error), error.code)
    finally:
        for side in sides:
            side.close()
    return _find_wrong_results(sides)


def _find_wrong_results(sides: Sequence[Side]) -> End | None:
    for side in sides:
        run = store.read(side.folder)
        if run.exit_code == 4:
            errors = (finding.sentence for finding in run.findings if finding.severity == "error")
            failed = Failed(side, next(errors, "a result was wrong"), 4)
            return End("failed", str(failed), 4)
    return None
