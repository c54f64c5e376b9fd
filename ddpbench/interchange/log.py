"""Build a run from another tool's log: each start of the tool is a launch.

The cases carry the tool's own identity (its definition of a time, its statistic, its reduction over
ranks), so that its figures are compared only with figures of the same tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from ddpbench.catalog.dtypes import DTYPES
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.records.launched import Launch
from ddpbench.records.schema import LEFT_OUT, Case, Finding, Plan, Result, Run, Summary, Wrong

# The tools' names in lower case, less `_`, `-` and `_perf`. sendrecv passes a buffer round in a
# ring, which is no operation of ddpbench: it keeps its own name.
NAMES = {key.replace("_", ""): key for key in (*OPERATIONS, "sendrecv") if key != "bidirectional"}
TYPES = {
    "char": "int8",
    "int": "int32",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
COLUMN = re.compile(r"(?:(?:Avg|Min|Max) )?Latency ?\(us\)|\S+")
UNKNOWN: dict[str, Any] = {one.name: None for one in fields(Summary) if one.default is MISSING}


@dataclass(frozen=True)
class Hints:
    """Facts that the user states for logs that do not print them."""

    operation: str | None = None
    ranks: int | None = None


NO_HINTS = Hints()


@dataclass(frozen=True)
class Part:
    """What one start of a tool printed."""

    text: str
    line: int  # number of its first line in the log
    hints: Hints
    left_out: list[tuple[int, str]]  # line and reason of everything that is not read


@dataclass(frozen=True)
class Test:
    """What the figures of one start of a tool have in common; as nccl-tests measures by default."""

    tool: str
    version: str
    operation: str
    world_size: int
    calls: int = 0  # in one figure; 0: unknown
    backend: str = "nccl"
    device: str = "cuda"
    issue: str = "pipelined"
    time_definition: str = "loop of calls with one wait at its end / calls"


def find_operation(name: str) -> str:
    """Return the operation of a test or program. Raises ValueError if it is unknown."""
    short = name.rpartition("/")[2].partition("_perf")[0]
    operation = NAMES.get(re.sub("[_-]", "", short).lower())
    if operation is None:
        raise ValueError(f"the test {short!r} is unknown: ddpbench reads {', '.join(NAMES)}")
    return operation


def make_result(test: Test, cells: Mapping[str, Any], *, in_place: bool = False) -> Result:
    """Build the result of one figure. Raises ValueError for impossible values.

    cells: size, type, time; if known count, redop, root, #wrong, calls, least (of a rank); in µs.
    """
    case, seconds = _make_case(test, cells, in_place), float(cells["time"]) * 1e-6
    if not (0 <= case.nbytes < 2**63 and 0 < case.world_size <= 2**20 and 0 < seconds < 1e9):
        raise ValueError(f"{case.nbytes} bytes in {cells['time']} µs, {case.world_size} ranks")
    operation, outcome = OPERATIONS.get(test.operation), str(cells.get("#wrong")).rstrip("*")
    checked = outcome not in ("N/A", "None")
    failed = checked and outcome != "Pass" and (outcome == "Fail" or float(outcome) != 0)
    return Result(
        case=case,
        launch=0,
        bus_factor=operation.bus_factor(case.world_size) if operation else 1.0,
        least_nbytes=operation.least_nbytes(case) if operation else float(case.nbytes),
        requested_nbytes=case.nbytes,
        summary=replace(
            Summary(**UNKNOWN),
            repetitions=int(cells.get("calls", test.calls)),
            median_seconds=seconds,
            mean_seconds=seconds,
            percentiles_seconds={},
            rank_min_seconds=float(cells["least"]) * 1e-6 if "least" in cells else None,
            overall_mean_seconds=seconds,
        ),
        checks=int(checked),
        wrong=(Wrong(-1, -1, -1, "right elements", outcome),) if failed else (),
    )


def _make_case(test: Test, cells: Mapping[str, Any], in_place: bool) -> Case:
    operation, nbytes = OPERATIONS.get(test.operation), int(cells["size"])
    dtype = TYPES.get(str(cells["type"]), str(cells["type"]))
    reduce_op = str(cells.get("redop", "sum" if operation and operation.reduces else "none"))
    root = int(cells.get("root", 0 if operation and operation.rooted else -1))
    blocks = test.world_size if operation and operation.blocks else 1
    pipelined = test.issue == "pipelined"
    count = nbytes // (DTYPES[dtype].nbytes if dtype in DTYPES else 1) // blocks
    return Case(
        operation=test.operation,
        form="tensor",
        backend=test.backend,
        provider=test.tool,
        device=test.device,
        dtype=dtype,
        reduce_op=None if reduce_op == "none" else reduce_op,
        root=None if root < 0 else root,
        nbytes=nbytes,
        count=int(cells.get("count", count)),
        in_place=in_place,
        async_op=False,
        issue=test.issue,
        start="none" if pipelined else "barrier",
        depth=test.calls if pipelined else 1,
        world_size=test.world_size,
        ranks_per_host=(),
        buffers=test.tool,
        time_definition=test.time_definition,
        rank_reduction="mean",
        statistic="mean",
    )


Convert = Callable[[list[tuple[str, str]]], Iterable[Result]]


def read_rows(part: Part, heads: re.Pattern[str], convert: Convert) -> list[Result]:
    """Read the table below its heads. convert: columns and cells of one line → results.

    Raises ValueError if the part has several tables.
    """
    results: list[Result] = []
    columns: list[str] = []
    lines = part.text.split("\n")
    for i, line in enumerate(lines):
        if heads.match(line):
            if columns:
                raise ValueError("the test has several tables: give each a file")
            columns = COLUMN.findall(line.lstrip("# "))
        elif columns and line[:1].isdigit():
            try:
                # A line without a line break may have been cut; no figure has 17 digits.
                if i + 1 == len(lines) or re.search(r"\d{17}", line):
                    raise ValueError
                results += [*convert([*zip(columns, line.split(), strict=True)])]
            except (ArithmeticError, LookupError, ValueError):
                part.left_out.append((part.line + i, f"the row {line[:80]!r} is damaged"))
    return results


def build_run(
    name: str, tests: Sequence[tuple[Test, list[Result]]], left_out: Sequence[tuple[int, str]]
) -> Run:
    """Build the run of a log. Each start of a test is another launch of its cases."""
    launches: dict[int, Launch] = {}
    results: list[Result] = []
    counts: dict[Case, int] = {}  # launches of each case so far
    for test, new in tests:
        number = max(counts.get(result.case, 0) for result in new)
        counts.update({result.case: number + 1 for result in new})
        launch = Launch(
            index=number,
            backend=test.backend,
            provider=test.tool,
            library=f"{test.tool} {test.version}",
            launcher="not told",
            world_size=test.world_size,
            facts={"tool": f"{test.tool} {test.version}"},
        )
        launches.setdefault(number, launch)
        results += [replace(result, launch=number) for result in new]
    first = results[0].case
    findings = [_describe_wrong(result) for result in results if result.wrong]
    if left_out:
        line, reason = min(left_out)
        sentence = f"rows or tests left out: {len(left_out)}; the first is in line {line}: {reason}"
        findings.append(Finding("note", LEFT_OUT, sentence, place={"line": line}))
    return Run(
        id=name,
        command=first.provider,
        command_line=(),
        plan=Plan(first.issue, first.start, first.depth, check=any(r.checks for r in results)),
        started="",
        state="complete",
        operations=tuple(dict.fromkeys(result.case.operation for result in results)),
        backends=(first.backend,),
        launches=tuple(launches[number] for number in sorted(launches)),
        results=tuple(results),
        findings=tuple(findings),
    )


def _describe_wrong(result: Result) -> Finding:
    case = result.case
    return Finding(
        "error",
        "wrong-result",
        f"{case.operation} on {case.backend}, {case.nbytes} bytes of {case.dtype}, "
        f"{'in' if case.in_place else 'out of'} place: the log reports {result.wrong[0].got}",
        "do not train on this set-up; run the tool again to see whether it stays",
        {"operation": case.operation, "nbytes": case.nbytes},
    )
