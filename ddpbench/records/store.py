"""Store runs on disk: one folder per run, with every case as soon as it is measured.

run.json         everything except the raw samples, replaced atomically
run.jsonl        while the run goes on: later cases and launches, one per line
samples.parquet  entry and exit of every rank and repetition, of very many ranks only some
                 (analysis/stats.py); while the run goes on, a folder of parts
table.csv  table.txt
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpbench.records import codec, redact
from ddpbench.records.schema import SCHEMA, Run

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

STAMPS = ("entry_ns", "exit_ns", "device_ns")
SAMPLE_COLUMNS = ("case", "launch", "repetition", "rank", *STAMPS, "warm_up")
# Time stamps grow steadily: their differences take a quarter of the space.
PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": ["case"],
    "column_encoding": dict.fromkeys(SAMPLE_COLUMNS[1:-1], "DELTA_BINARY_PACKED"),
}

GROWING = "run.jsonl"
BASELINES = Path("results/baselines")
# The folders in which a run is found by its name, in this order.
RUN_FOLDERS = (Path("results"), BASELINES, Path("results/reference"))


# Errors that impossible values cause.
IMPOSSIBLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class InvalidRun(ValueError):
    """A stored run that cannot be read; the message states which one and why."""


class End(NamedTuple):
    """How a run ended: "complete", "interrupted" or "failed"; the reason; the exit code."""

    state: str
    reason: str | None
    code: int


def format_now() -> str:
    """Format the time now: UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def create(folder: Path | None, run: Run, label: str) -> Path:
    """Create the folder of a new run and store its first record.

    folder: the folder of `--output`; None creates one in results/.
    Raises OSError if it cannot be written, FileExistsError if it already contains a run.
    """
    if folder is None:
        folder = new_folder(label)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "run.json").exists():
            raise FileExistsError(f"{folder} already contains a run: choose another --output")
        (folder / GROWING).unlink(missing_ok=True)
    write(folder, replace(run, id=folder.name))
    return folder


def new_folder(label: str, results: Path = Path("results")) -> Path:
    """Create a folder in results/; two runs that start in the same second get one each.

    Raises OSError if it cannot be created.
    """
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    name = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{label}-{host}"
    results.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 1000):
        folder = results / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{results / name} and 998 more exist: choose a folder with --output")


def explain_unwritable(error: OSError) -> str:
    """Explain in one sentence why a results folder cannot be created."""
    if not error.strerror:
        return str(error)
    return (
        f"results cannot be written to {error.filename} ({error.strerror}): "
        "choose a writable folder with --output"
    )


def write(folder: Path, run: Run) -> None:
    """Replace run.json atomically, without secrets."""
    replace_file(folder / "run.json", codec.encode(redact.record(codec.to_plain(run))))


def append(folder: Path, line: dict[str, Any]) -> None:
    """Add a line without secrets to a running run.

    line: a launch ({"launches": …}; the last one of an index counts), or an outcome with its number
    among all outcomes ({"number": 7, "results": …}). Rewriting run.json instead would take a second
    per case after a few hundred cases.
    """
    with (folder / GROWING).open("ab") as file:
        file.write(codec.encode(line, indent=None) + b"\n")


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically. Raises OSError with the name of this file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:  # it names the temporary file, or none
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: Path) -> bytes:
    """Read the bytes of a regular file. Raises OSError for other files: a FIFO would never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def read(folder: Path) -> Run:
    """Read the run in a folder. Raises InvalidRun with one sentence if it cannot be read."""
    path, lines = folder / "run.json", folder / GROWING
    try:
        raw = codec.parse(read_file(path))
        schema = raw.get("schema") if isinstance(raw, dict) else None
        if type(schema) is not int:
            raise InvalidRun(f"{path} is not a ddpbench run: the schema number is missing")
        if schema > SCHEMA:
            raise InvalidRun(
                f"{path} has schema {schema}, but this ddpbench reads schemas up to {SCHEMA}: "
                "use the ddpbench that wrote it, or a newer one"
            )
        if lines.exists():
            path = lines
            _grow(raw, read_file(path))
        run = codec.decode(Run, raw)
    except InvalidRun:
        raise
    except OSError as error:
        reason = f"{error.strerror} ({path.name})"
        raise InvalidRun(f"{folder} contains no run: {reason}") from None
    except ValueError as error:
        raise InvalidRun(f"{path} is damaged: {error}") from None
    # Launches run in random order. Their index is in the order of the backends requested.
    return replace(run, launches=tuple(sorted(run.launches, key=lambda launch: launch.index)))


def _grow(raw: dict[str, Any], data: bytes) -> None:
    """Add the lines of `append` to a parsed run. Ignores a last line without its end: it is still
    being written. Raises ValueError for a line that `append` does not write."""
    parts = ("results", "steps", "examinations")
    try:
        known = sum(len(raw.get(part, ())) for part in parts)
        for text in data.split(b"\n")[:-1]:
            line = codec.parse(text)
            if "launches" in line:
                index = line["launches"]["index"]
                others = [launch for launch in raw["launches"] if launch["index"] != index]
                raw["launches"] = [*others, line["launches"]]
            elif line["number"] >= known:  # otherwise run.json already contains it
                part = (set(parts) & set(line)).pop()
                raw.setdefault(part, []).append(line[part])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a line contains no launch or outcome ({error!r})") from None


@contextlib.contextmanager
def refuse_impossible_values(name: str) -> Iterator[None]:
    """Raise InvalidRun instead of an error that values of the stored run `name` cause.

    A value can have the right type and still be impossible: a time of 0 seconds, or an examination
    without one of its figures.
    """
    try:
        yield
    except InvalidRun:
        raise
    except IMPOSSIBLE as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise InvalidRun(
            f"{name} contains values that cannot be shown ({type(error).__name__}: {error}, at "
            f"{Path(last.filename).name}:{last.lineno}): measure it again"
        ) from error


def close(folder: Path, state: str, reason: str | None, exit_code: int) -> Run:
    """Mark a run complete, interrupted or failed, unless its end is marked already."""
    run = read(folder)
    if run.state == "running":
        run = replace(
            run, state=state, state_reason=reason, exit_code=exit_code, ended=format_now()
        )
        write(folder, run)
    return run


def find(name: str) -> Path:
    """Find a run's folder by its path, by its name in RUN_FOLDERS, or as `last`.

    Raises InvalidRun with the names of the latest runs.
    """
    path = Path(name)
    if path.name == "run.json":
        path = path.parent
    for candidate in (path, *(folder / name for folder in RUN_FOLDERS)):
        if os.path.lexists(candidate / "run.json"):
            return candidate
    folders = list_runs()
    if name == "last" and folders:
        return folders[-1]
    known = ", ".join(folder.name for folder in folders[-3:]) or "results/ contains no run yet"
    missing = f"{name} does not exist" if path.suffix and not path.exists() else f"no run {name!r}"
    raise InvalidRun(
        f"{missing}: give a folder with a run.json, a log, or a name from `ddpbench list` ({known})"
    )


def find_runs(name: str) -> list[Path]:
    """Find the run of this name, or all runs in the folder of this name. Raises InvalidRun."""
    for folder in (Path(name), *(folder / name for folder in RUN_FOLDERS)):
        if not os.path.lexists(folder / "run.json") and (inside := list_runs(folder)):
            return inside
    return [find(name)]


def list_runs(results: Path = Path("results")) -> list[Path]:
    """List the folders in results/ that contain a run, oldest first; damaged ones come first."""

    def read_start(folder: Path) -> str:
        try:
            return str(codec.parse(read_file(folder / "run.json"))["started"])
        except (OSError, ValueError, TypeError, KeyError):
            return ""

    folders = (path.parent for path in results.glob("*/run.json"))
    return sorted(folders, key=lambda folder: (read_start(folder), folder.name))


def add_samples(folder: Path, part: int, columns: dict[str, Any]) -> None:
    """Store the raw samples of one case in one launch as a new part.

    columns: an array for each of SAMPLE_COLUMNS, all of one length; times in ns, -1 if not taken.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = folder / "samples.parts"
    parts.mkdir(exist_ok=True)
    temporary = parts / f".part-{part:05d}"
    table = pa.table({name: columns[name] for name in SAMPLE_COLUMNS})
    with temporary.open("wb") as file:  # pyarrow itself opens no path that is not UTF-8
        pq.write_table(table, file, **PARQUET)
    temporary.replace(parts / f"part-{part:05d}.parquet")


def read_samples(folder: Path) -> pd.DataFrame:
    """Read all raw samples of a run, finished or not, with SAMPLE_COLUMNS.

    Raises InvalidRun for a damaged file.
    """
    import pandas as pd
    import pyarrow as pa

    whole, parts = folder / "samples.parquet", folder / "samples.parts"
    paths = [whole] if whole.exists() else sorted(parts.glob("part-*.parquet"))
    try:
        frames = [_read_table(path).to_pandas() for path in paths]
    except (OSError, ValueError, pa.ArrowException) as error:
        first = (str(error).splitlines() or ["unknown error"])[0]
        raise InvalidRun(f"the samples in {folder} cannot be read: {first}") from None
    nothing = pd.DataFrame(columns=list(SAMPLE_COLUMNS))
    # Categories differ from part to part.
    joined: pd.DataFrame = pd.concat(frames or [nothing], ignore_index=True).astype({"case": str})
    return joined


def _read_table(path: Path) -> pa.Table:
    """Read a file in this thread: other threads of pyarrow may abort Python when it ends."""
    import pyarrow.parquet as pq

    with path.open("rb") as file:  # pyarrow itself opens no path that is not UTF-8
        return pq.ParquetFile(file).read(use_threads=False)


def join_samples(folder: Path) -> None:
    """Join the parts into samples.parquet, one row group per case; then remove the parts."""
    import pyarrow.parquet as pq

    parts = sorted((folder / "samples.parts").glob("part-*.parquet"))
    if not parts:
        return
    temporary = folder / ".samples.parquet"
    with contextlib.ExitStack() as stack:
        writer = None
        for path in parts:
            table = _read_table(path)
            if writer is None:
                target = stack.enter_context(temporary.open("wb"))
                writer = stack.enter_context(pq.ParquetWriter(target, table.schema, **PARQUET))
            writer.write_table(table)
    temporary.replace(folder / "samples.parquet")
    shutil.rmtree(folder / "samples.parts")
