"""Runs on disk: one folder a run; every case is there as soon as it is measured.

run.json         everything but the raw samples, replaced atomically
run.jsonl        until the end: what has come since, a case or a launch in a line
samples.parquet  entry and exit of every rank and repetition, of very many ranks a part
                 (analysis/kept.py); a folder of parts until the end
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
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpbench.records import codec, redact
from ddpbench.records.samples import SAMPLE_COLUMNS
from ddpbench.records.schema import SCHEMA, Run

if TYPE_CHECKING:
    import pandas as pd

# Stamps grow steadily: differences take a quarter of the room.
PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": ["case"],
    "column_encoding": {
        name: "DELTA_BINARY_PACKED" for name in SAMPLE_COLUMNS if name not in ("case", "warm_up")
    },
}

GROWING = "run.jsonl"
BASELINES = Path("results/baselines")
# Where a run is looked for by its name, in this order.
PLACES = (Path("results"), BASELINES, Path("results/reference"))


class InvalidRun(ValueError):
    """A stored run that cannot be read; the sentence says which and why."""


def format_now() -> str:
    """Format the time now: UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def create(folder: Path | None, run: Run, label: str) -> Path:
    """Make the folder of a new run and store its first record.

    folder: the very folder (`--output`), or None: a new one under results/.
    Raises OSError when it cannot be written, FileExistsError when it already holds a run.
    """
    if folder is None:
        folder = new_folder(label)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "run.json").exists():
            raise FileExistsError(f"{folder} already holds a run; name another --output")
        (folder / GROWING).unlink(missing_ok=True)
    write(folder, replace(run, id=folder.name))
    return folder


def new_folder(label: str, results: Path = Path("results")) -> Path:
    """A folder in results/ that nobody else has: two runs in one second get two.

    Raises OSError when it cannot be made.
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
    raise FileExistsError(f"{results / name} and 998 more exist; name a folder with --output")


def write(folder: Path, run: Run) -> None:
    """Store run.json in one step: a reader sees the old or the new one, never a half; and nobody
    sees a secret."""
    replace_file(folder / "run.json", codec.encode(redact.record(asdict(run))))


def append(folder: Path, line: dict[str, Any]) -> None:
    """Add to a run that grows: a launch ({"launches": …}; the last one of an index counts), or an
    outcome with its number among all ({"number": 7, "results": …}).

    To rewrite run.json instead would take a second a case once it holds some hundred.
    """
    with (folder / GROWING).open("ab") as file:
        file.write(codec.encode(line, indent=None) + b"\n")


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: Path) -> bytes:
    """The bytes of a file. Raises OSError for anything else: a FIFO would never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        return path.read_bytes()
    except MemoryError:
        raise OSError(errno.EFBIG, "larger than the memory", str(path)) from None


def read(folder: Path) -> Run:
    """The run in a folder. Raises InvalidRun with one sentence when it cannot be read."""
    path = folder / "run.json"
    try:
        data = read_file(path)
    except OSError as error:
        raise InvalidRun(f"{folder} holds no run: {error.strerror} ({path.name})") from None
    try:
        raw = codec.parse(data)
        schema = raw.get("schema") if isinstance(raw, dict) else None
        if type(schema) is not int:
            raise InvalidRun(f"{path} is not a ddpbench run: it has no schema number")
        if schema > SCHEMA:
            raise InvalidRun(
                f"{path} has schema {schema}, this ddpbench reads up to {SCHEMA}: "
                "read it with the ddpbench that wrote it, or a newer one"
            )
        raw = redact.record(raw)  # older ones were stored as they came
        if (folder / GROWING).exists():
            path = folder / GROWING
            _grow(raw, read_file(path))
        return codec.decode(Run, raw)
    except InvalidRun:
        raise
    except OSError as error:
        raise InvalidRun(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidRun(f"{path} is damaged: {error}") from None


def _grow(raw: dict[str, Any], data: bytes) -> None:
    """Add the lines of `append` to a run as JSON has it; a last line that is not whole is still
    being written. Raises ValueError for what is no such line."""
    parts = ("results", "steps", "examinations")
    try:
        known = sum(len(raw.get(part, ())) for part in parts)
        for text in data.split(b"\n")[:-1]:
            line = codec.parse(text)
            if "launches" in line:
                index = line["launches"]["index"]
                others = [each for each in raw["launches"] if each["index"] != index]
                raw["launches"] = [*others, line["launches"]]
            elif line["number"] >= known:  # else run.json has it already
                part = (set(parts) & set(line)).pop()
                raw.setdefault(part, []).append(line[part])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a line holds no launch or outcome ({error!r})") from None


@contextlib.contextmanager
def refuse_impossible_values(name: str) -> Iterator[None]:
    """Raises InvalidRun for an error that the values of the stored run `name` cause.

    Every value can have the right type and still be impossible: a time of 0 seconds, or figures of
    an examination that lack one.
    """
    try:
        yield
    except InvalidRun:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise InvalidRun(
            f"{name} holds values that cannot be shown ({type(error).__name__}: {error}, at "
            f"{Path(last.filename).name}:{last.lineno}): measure it again"
        ) from error


def close(folder: Path, state: str, reason: str | None, exit_code: int) -> Run:
    """Mark a run complete, interrupted or failed. An end already marked is kept."""
    run = read(folder)
    if run.state == "running":
        run = replace(
            run, state=state, state_reason=reason, exit_code=exit_code, ended=format_now()
        )
        write(folder, run)
    return run


def find(name: str) -> Path:
    """The folder of a run, by path, by its name in results/, a baseline's too, or `last`.

    Raises InvalidRun naming what there is.
    """
    path = Path(name)
    if path.name == "run.json":
        path = path.parent
    for candidate in (path, *(place / name for place in PLACES)):
        if os.path.lexists(candidate / "run.json"):
            return candidate
    folders = list_runs()
    if name == "last" and folders:
        return folders[-1]
    known = ", ".join(folder.name for folder in folders[-3:]) or "there is none in results/ yet"
    raise InvalidRun(
        f"no run {name!r}: give a folder with a run.json, a log, or a name from `list` ({known})"
    )


def find_runs(name: str) -> list[Path]:
    """The run of this name, or all runs in the folder of this name. Raises InvalidRun."""
    for folder in (Path(name), *(place / name for place in PLACES)):
        if not os.path.lexists(folder / "run.json") and (inside := list_runs(folder)):
            return inside
    return [find(name)]


def list_runs(results: Path = Path("results")) -> list[Path]:
    """The folders in results/ that hold a run, oldest first."""
    folders = (path.parent for path in results.glob("*/run.json"))
    return sorted(folders, key=lambda folder: (_started(folder), folder.name))


def list_calibrations(results: Path = Path("results")) -> list[Path]:
    """The folders that `calibrate` has made, oldest first; each holds two runs, a and b."""
    return sorted(path.parents[1] for path in results.glob("calibrations/*/b/run.json"))


def _started(folder: Path) -> str:
    """When a run began, as it says itself; a folder's name may be the user's own."""
    try:
        return str(codec.parse(read_file(folder / "run.json"))["started"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def add_samples(folder: Path, part: int, columns: dict[str, Any]) -> None:
    """Store the raw samples of one case in one launch as a part of their own.

    columns: one array for each of SAMPLE_COLUMNS, all of one length; ns, -1 where not taken.
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
    """All raw samples of a run, finished or not, with SAMPLE_COLUMNS.

    Raises InvalidRun for a file that is damaged.
    """
    import pandas as pd
    import pyarrow as pa

    whole, parts = folder / "samples.parquet", folder / "samples.parts"
    found: Iterable[Path] = [whole] if whole.exists() else sorted(parts.glob("part-*.parquet"))
    frame: pd.DataFrame = pd.DataFrame(columns=list(SAMPLE_COLUMNS))
    try:
        tables = [_table(path) for path in found]
        if tables:
            frame = pa.concat_tables(tables).to_pandas()
    except (OSError, ValueError, pa.ArrowException) as error:
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise InvalidRun(f"the samples in {folder} cannot be read: {first}") from None
    return frame


def _table(path: Path) -> Any:
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        return pq.read_table(file)


def join_samples(folder: Path) -> None:
    """Make one samples.parquet of the parts, a row group a case; the parts go when it stands."""
    import pyarrow.parquet as pq

    parts = sorted((folder / "samples.parts").glob("part-*.parquet"))
    if not parts:
        return
    temporary = folder / ".samples.parquet"
    with (
        temporary.open("wb") as file,
        pq.ParquetWriter(file, _table(parts[0]).schema, **PARQUET) as writer,
    ):
        for part in parts:
            writer.write_table(_table(part))
    temporary.replace(folder / "samples.parquet")
    shutil.rmtree(folder / "samples.parts")
