"""Read one start of nccl-tests or rccl-tests (text since 2.13, JSON) or of OSU (since 5.9).

nccl-tests and rccl-tests time a loop of iterations and synchronise once at the end: `pipelined`,
the mean over the iterations and over processes. Sizes are the total buffer.
OSU times each call in each rank, with a barrier after it, and prints the mean over calls and ranks.
Where its size is one rank's block, ddpbench multiplies it to get the total buffer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddpbench.catalog.operations import OPERATIONS
from ddpbench.interchange.log import Part, Test, find_operation, make_result, read_rows
from ddpbench.records import codec
from ddpbench.records.schema import EXIT_ENTRY, Result

NCCL_TEXT = re.compile(
    r"^(?:# (?P<tool>[nr]ccl-tests) version (?P<version>.+)\n)?"
    r"(?:# Collective test starting: (?P<name>\S+)\n)?"
    r"# nThread \d+ nGpus \d+ .*\bwarmup iters: \d+ iters: (?P<iterations>\d{1,9})"
    r"(?: agg iters: (?P<aggregated>\d{1,9}))?",
    re.MULTILINE,
)
NCCL_JSON = re.compile(r'\A.*?"args"\s*:\s*\[', re.DOTALL)
RCCL_JSON = re.compile(r'\A.*?\{[^{}]*"inPlace"\s*:[^{}]*\}', re.DOTALL)
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


def read_nccl_text(part: Part) -> tuple[Test, list[Result]]:
    """Read the text of nccl-tests or rccl-tests. Raises ValueError with a sentence."""
    start, places, hints = NCCL_TEXT.match(part.text), PLACES.search(part.text), part.hints
    assert start is not None
    _refuse_options(part)
    operation = find_operation(start["name"]) if start["name"] else hints.operation
    ranks = _count_ranks(part.text) or hints.ranks
    if not operation or not ranks:
        missing = "number of ranks: state --ranks 8" if operation else "operation: state --op NAME"
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
                raise ValueError("the printed bandwidth is not size / time")
            if size:  # 0: less than a block for each rank, so nothing was sent
                yield make_result(test, row, in_place=place == "in-place")

    results = read_rows(part, NCCL_HEADS, convert)
    if FAILED.search(part.text) and not any(result.wrong for result in results):
        raise ValueError("a check failed, but in no row that can be read")
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


def read_rccl_json(part: Part) -> tuple[Test, list[Result]]:
    """Read the JSON of rccl-tests (-x): one record for each figure. Raises ValueError."""
    results = []
    for match in re.findall(r"\{[^{}]*\}", part.text):
        record = {"ranks": 1, "gpus": 1, "gpusPerRank": 1, **codec.parse(match.encode())}
        ranks = int(record["ranks"]) * int(record["gpus"]) * int(record["gpusPerRank"])
        test = Test("rccl-tests", "of unknown version", find_operation(record["name"]), ranks)
        if record["size"]:
            row = {"#wrong": record.get("wrong"), **record}
            results.append(make_result(test, row, in_place=bool(record["inPlace"])))
    if part.text.count("{") > part.text.count("}"):
        part.left_out.append((part.line + part.text.count("\n"), "the last record is not whole"))
    return test, results


def _refuse_options(part: Part) -> None:
    if OPTION.search(part.text):
        raise ValueError("ddpbench reads no test with -a, -G, -u or -z, which change what is timed")


def _count_ranks(text: str) -> int:
    """Return the number of ranks in the first group; 0 if the list of devices is not whole."""
    devices = DEVICE.findall(text)
    ranks = [int(rank) for rank, _ in devices]
    if len({*ranks}) < len(ranks):
        raise ValueError("several tests wrote at once (build them with MPI=1): give each a file")
    whole = ranks == [*range(len(ranks))]
    return sum(group == devices[0][1] for _, group in devices) if whole else 0


def read_osu(part: Part) -> tuple[Test, list[Result]]:
    """Read a table of the OSU Micro-Benchmarks. Raises ValueError with a sentence."""
    title, datatype, ranks = OSU.match(part.text), DATATYPE.search(part.text), part.hints.ranks
    assert title is not None
    operation = find_operation(title["name"] or title[0])
    if ranks is None:
        raise ValueError("the log does not print the number of ranks: state --ranks 8")
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
