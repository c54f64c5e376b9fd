"""Read the JSON that rccl-tests writes with -x: one record for each figure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpbench.catalog.dtypes import DTYPES as KNOWN
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.interchange.log import Hints, Row, Section
from ddpbench.interchange.nccl_tests import DTYPES, PROGRAMS, Setup, build_row
from ddpbench.records import codec

RECORD = re.compile(r"\{[^{}]*\}")
MARK = re.compile(r'\{[^{}]*"inPlace"[^{}]*"busBw"|\{[^{}]*"busBw"[^{}]*"inPlace"')


@dataclass(frozen=True)
class _Record:
    name: str
    size: int
    type: str
    redop: str
    inPlace: int  # noqa: N815  the names are those of the file
    time: float
    wrong: str = "N/A"
    nodes: int = 1
    ranks: int = 1
    gpus: int = 1
    gpusPerRank: int = 1  # noqa: N815


def recognizes(lines: Sequence[str]) -> bool:
    """Return whether a test wrote this with -x."""
    return any(MARK.match(each) for each in RECORD.findall("\n".join(lines)))


def read(path: Path, lines: Sequence[str], hints: Hints) -> tuple[str, list[Section]]:
    """Return the tool and its one section. Raises ValueError with one sentence."""
    text = "\n".join(lines).replace('"#wrong"', '"wrong"')
    records = [codec.decode(_Record, json.loads(each)) for each in RECORD.findall(text)]
    rows, setup = [], None
    for record in records:
        if record.size:  # 0: less than a block for each rank, so nothing was sent
            setup = _setup(record)
            rows.append(_row(setup, record))
    if setup is None:
        raise ValueError("has no record with a size above 0")
    note = (
        "rccl-tests writes no number of iterations, no root and no options with -x: none of -m, "
        "-z, -G and -a, and root 0 are assumed"
    )
    cut = "{" in RECORD.sub("", text)
    left_out = ("the last record is not whole, and others may be missing",) if cut else ()
    return setup.tool, [setup.section(rows, notes=(note,), left_out=left_out)]


def _setup(record: _Record) -> Setup:
    program = next((p for p in PROGRAMS if p.replace("_", "") == record.name.lower()), None)
    if program is None:
        raise ValueError(f"is of {record.name}, which ddpbench does not read")
    return Setup(
        program=program,
        tool="rccl-tests",
        version=None,
        library=None,
        iterations=0,
        aggregated=1,
        graph=0,
        blocking=0,
        average=1,
        unalign=0,
        world_size=record.ranks * record.gpusPerRank * record.gpus,
        ranks=(),
    )


def _row(setup: Setup, record: _Record) -> Row:
    operation = OPERATIONS.get(PROGRAMS[setup.program])
    dtype = KNOWN.get(DTYPES.get(record.type, record.type))
    ranks = setup.world_size if operation and operation.blocks else 1
    root = 0 if operation and operation.rooted else -1
    case = setup.case(
        record.type,
        record.redop,
        root=root,
        nbytes=record.size,
        count=record.size // (dtype.nbytes if dtype else 1) // ranks,
        place="in" if record.inPlace else "out",
    )
    wrong = None if record.wrong == "N/A" else float(record.wrong)
    return build_row(setup, case, record.time * 1e-6, wrong is not None, wrong)
