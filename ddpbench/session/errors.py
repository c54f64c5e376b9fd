"""Errors: one sentence on stderr, from one rank, and an exit code."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from ddpbench.launch.placement import Refused, read_placement
from ddpbench.records.store import InvalidRun
from ddpbench.records.terminal_text import silence_stdout, tell
from ddpbench.runtime.control import first_line

WAIT_FOR_SPEAKER_SECONDS = 2.0


def report_errors(run: Callable[[], int]) -> int:
    """Call `run` and return its exit code; turn an error into a sentence and its exit code.

    The guide, chapter results, lists the codes.
    """
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except Refused as error:
        speak(str(error), error.speaker)
        return 2
    except InvalidRun as error:
        tell(str(error))
        return 3
    except BrokenPipeError:
        silence_stdout()  # its reader has gone (`| head`)
        return 0
    except (OSError, ImportError, MemoryError) as error:
        silence_stdout()
        speak(_describe(error))
        return 2
    except KeyboardInterrupt:
        return 130


def refuse(sentence: str) -> NoReturn:
    """End this process with a sentence and exit code 2; under a launcher only rank 0 speaks."""
    speak(sentence)
    raise SystemExit(2)


def speak(sentence: str, speaker: int = 0) -> None:
    """Write a sentence to stderr in the speaking rank; let the other ranks wait a moment.

    A launcher ends all ranks as soon as one has left, the speaker too.
    """
    own = None
    with contextlib.suppress(Refused):  # the launcher's variables contradict each other
        own = read_placement()
    if own is None or own.rank == speaker:
        tell(sentence)
    else:
        time.sleep(WAIT_FOR_SPEAKER_SECONDS)


def _describe(error: Exception) -> str:
    """Return the sentence for what this machine lacks or refuses: a package, a file, memory."""
    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] != "ddpbench":
        return (
            f"{error.name} is not installed for {sys.executable}: activate the environment that "
            "has it (source .venv/bin/activate), or use ./run_bench.sh instead of ddpbench"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read or written: {error.strerror}"
    return f"{type(error).__name__}: {first_line(error)}"
