"""Read logs of nccl-tests and rccl-tests (text since 2.13, JSON of -J) and of OSU (since 5.9).

nccl-tests and rccl-tests time a loop of iterations and synchronise once at the end: `pipelined`,
the mean over the iterations and over processes. Sizes are the total buffer.
OSU times each call in each rank, with a barrier after it, and prints the mean over calls and ranks.
Where its size is one rank's block, ddpbench multiplies it to get the total buffer.

Each start of a tool is a launch of a run. The cases carry the tool's own identity (its definition
of a time, its statistic, its reduction over ranks), so that its figures are compared only with
figures of the same tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from ddpbench.catalog.dtypes import DTYPES
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.records import codec
from ddpbench.records.launched import Launch
from ddpbench.records.schema import (
    EXIT_ENTRY,
    LEFT_OUT,
    Case,
    Finding,
    Plan,
    Result,
    Run,
    Summary,
    Wrong,
)

# The tools' names in lower case, without `_`, `-` and `_perf`. sendrecv passes a buffer around a
# ring. ddpbench has no such operation, so it keeps its own name.
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
NCCL_TEXT = re.compile(
    r"^(?:# (?P<tool>[nr]ccl-tests) version (?P<version>.+)\n)?"
    r"(?:# Collective test starting: (?P<name>\S+)\n)?"
    r"# nThread \d+ nGpus \d+ .*\bwarmup iters: \d+ iters: (?P<iterations>\d{1,9})"
    r"(?: agg iters: (?P<aggregated>\d{1,9}))?",
    re.MULTILINE,
)
NCCL_JSON = re.compile(r'\A.*?"args"\s*:\s*\[', re.DOTALL)
NCCL_HEADS = re.compile(r"# +size +count +type +redop +root +")
PLACES = re.compile(r"^# +((?:(?:out-of|in)-place *)+)$", re.MULTILINE)
DEVICE = re.compile(r"^# +Rank +(\d+) +(?:Group +(\d+) +)?Pid +\d+ +on ", re.MULTILINE)
FAILED = re.compile(r"^# Out of bounds values *: \d+ FAILED", re.MULTILINE)
AMD = re.compile(r"rccl-tests|# Errors with asterisks|\bRCCL version|\bAMD\b|\bRadeon\b")
# Options that change what is timed, as they are printed, and as arguments in JSON
OPTION = re.compile(
    r'^# Blocking Enabled|\b(?:graph|unalign)"?: *[1-9]|"(?:-a|--average)[", =]*[023]'
    r'|"(?:-[uz]|--unalign|--blocking)[", =]*[1-9]',
    re.MULTILINE,
)
OSU = re.compile(
    r"^# OSU (?:MPI (?P<name>\S+)(?: Personalized Exchange)? Latency Test v(?P<version>\S+)$|.*)",
    re.MULTILINE,
)
OSU_HEADS = re.compile(r"# +(?:Size +)?Avg Latency ?\(us\)")
DATATYPE = re.compile(r"^# Datatype: MPI_(\w+)", re.MULTILINE)
OF_BLOCKS = ("all_gather", "all_to_all", "gather", "scatter")  # the size is that of one block
COLUMNS = {
    "Size": "size",
    "Avg Latency(us)": "time",
    "Min Latency(us)": "least",
    "Iterations": "calls",
    "Validation": "#wrong",
}


@dataclass(frozen=True)
class Hints:
    """Facts that the user states for logs that do not print them."""

    operation: str | None = None
    ranks: int | None = None


NO_HINTS = Hints()


@dataclass(frozen=True)
class Part:
    """The output of one start of a tool."""

    text: str
    line: int  # number of its first line in the log
    hints: Hints
    left_out: list[tuple[int, str]]  # line and reason of everything that is not read


@dataclass(frozen=True)
class Test:
    """Facts that all figures of one start of a tool share; defaults are those of nccl-tests."""

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
                raise ValueError("the test has several tables: put each into a file of its own")
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
            launcher="unknown",
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
        "do not train on this set-up; run the tool again to see whether the error repeats",
        {"operation": case.operation, "nbytes": case.nbytes},
    )


def read_nccl_text(part: Part) -> tuple[Test, list[Result]]:
    """Read the text of nccl-tests or rccl-tests. Raises ValueError with a sentence."""
    start, places, hints = NCCL_TEXT.match(part.text), PLACES.search(part.text), part.hints
    assert start is not None
    _refuse_options(part)
    operation = find_operation(start["name"]) if start["name"] else hints.operation
    ranks = _count_ranks(part.text) or hints.ranks
    if not operation or not ranks:
        missing = "number of ranks: add --ranks 8" if operation else "operation: add --op NAME"
        raise ValueError(f"the log does not print the {missing}")
    test = Test(
        start["tool"] or ("rccl-tests" if AMD.search(part.text) else "nccl-tests"),
        start["version"] or "of unknown version",
        operation,
        ranks,
        int(start["iterations"]) * int(start["aggregated"] or 1),
    )

    def convert(cells: list[tuple[str, str]]) -> Iterator[Result]:
        sides = [i for i, (column, _) in enumerate(cells) if column == "time"]
        for place, i in zip(places[1].split() if places else (), sides, strict=True):
            row = dict([*cells[: sides[0]], *cells[i : i + 4]])
            size, microseconds = int(row["size"]), float(row["time"])
            rate = size / microseconds / 1e3
            if abs(rate - float(row["algbw"])) > 0.006 + rate * (0.001 + 0.006 / microseconds):
                raise ValueError("the printed bandwidth does not equal size / time")
            if size:  # 0: less than a block for each rank, so nothing was sent
                yield make_result(test, row, in_place=place == "in-place")

    results = read_rows(part, NCCL_HEADS, convert)
    if FAILED.search(part.text) and not any(result.wrong for result in results):
        raise ValueError("a check failed, but not in a row that ddpbench can read")
    if "# Avg bus bandwidth" not in part.text:
        end = part.line + part.text.count("\n")
        part.left_out.append((end, "the test did not end with the line '# Avg bus bandwidth'"))
    return test, results


def read_nccl_json(part: Part) -> tuple[Test, list[Result]]:
    """Read the JSON of nccl-tests (-J). Raises ValueError with a sentence."""
    _refuse_options(part)
    whole = part.text.partition("{")[2].rpartition("}")[0]
    data = codec.parse(f"{{{whole}}}".encode())
    config, devices = data["config"], data["config"]["devices"]
    processes = sum(each.get("group") == devices[0].get("group") for each in devices)
    test = Test(
        "rccl-tests" if AMD.search(devices[0]["device_info"]) else "nccl-tests",
        f"of unknown version, nccl-library={data.get('nccl_version')}",
        find_operation(data["args"][0]),
        processes * int(config["nthreads"]) * int(config["ngpus"]),
        int(config["iterations"]) * int(config.get("aggregated_iterations", 1)),
    )
    return test, [
        make_result(test, {**row, **row[place], "#wrong": row[place]["nwrong"]}, in_place=in_place)
        for row in data["results"]
        for place, in_place in (("out_of_place", False), ("in_place", True))
        if row["size"] and row.get(place) is not None
    ]


def _refuse_options(part: Part) -> None:
    if OPTION.search(part.text):
        raise ValueError("ddpbench cannot read tests with -a, -G, -u or -z: they change the timing")


def _count_ranks(text: str) -> int:
    """Return the number of ranks in the first group; 0 if the list of devices is incomplete."""
    devices = DEVICE.findall(text)
    ranks = [int(rank) for rank, _ in devices]
    if len({*ranks}) < len(ranks):
        raise ValueError("several tests wrote at once: build them with MPI=1, or use a file each")
    whole = ranks == [*range(len(ranks))]
    return sum(group == devices[0][1] for _, group in devices) if whole else 0


def read_osu(part: Part) -> tuple[Test, list[Result]]:
    """Read a table of the OSU Micro-Benchmarks. Raises ValueError with a sentence."""
    title, datatype, ranks = OSU.match(part.text), DATATYPE.search(part.text), part.hints.ranks
    assert title is not None
    operation = find_operation(title["name"] or title[0])
    if ranks is None:
        raise ValueError("the log does not print the number of ranks: add --ranks 8")
    test = Test(
        "osu",
        title["version"],
        operation,
        ranks,
        backend="mpi",
        device="cpu",
        issue="isolated",
        time_definition=EXIT_ENTRY,
    )
    # Early releases do not print the datatype.
    default = "float" if OPERATIONS[operation].reduces else "char"
    dtype = datatype[1].lower() if datatype else default

    def convert(cells: list[tuple[str, str]]) -> Iterator[Result]:
        row = {COLUMNS.get(column, column): cell for column, cell in cells}
        size = int(row.get("size", 0)) * (ranks if operation in OF_BLOCKS else 1)
        yield make_result(test, {**row, "size": size, "type": dtype})

    return test, read_rows(part, OSU_HEADS, convert)
