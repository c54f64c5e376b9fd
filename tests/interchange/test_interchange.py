"""Other tools' logs in, other tools' formats out: what is read is what the tool says, with its own
identity; what cannot be read is one sentence; what is written others can load."""

import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_runs import a_case, a_result, a_run, a_summary
from stored_steps import a_step_case, a_step_result, a_step_run, some_replicas
from without_torch import RUN_DDPBENCH, run_without_torch

from ddpbench import cli
from ddpbench.analysis import lines
from ddpbench.interchange import sources
from ddpbench.interchange.log import Hints
from ddpbench.records import codec, redact, store
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Result, Run, Wrong
from ddpbench.records.store import InvalidRun
from ddpbench.render import formats, prometheus

MIB = 2**20

# --- logs with the columns that the tools document ------------------------------------------------

NCCL_HEADS = ["size", "count", "type", "redop", "root", *2 * ["time", "algbw", "busbw", "#wrong"]]


def nccl(
    *rows: str, heads: Iterable[str] = NCCL_HEADS, name: str = "all_reduce_perf", ranks: int = 4,
    setup: str = "nThread 1 nGpus 4 minBytes 8 maxBytes 4194304 step: 4(factor) warmup iters: 1 "
    "iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0",
    extra: str = "", group: str = "Group  0 ", bounds: str = "0 OK",
) -> str:  # fmt: skip
    """What a test of nccl-tests prints; name "": a release that prints no name and no version."""
    named = [
        "# nccl-tests version 2.19.6 nccl-headers=22808 nccl-library=22808",
        f"# Collective test starting: {name}",
    ]
    return "\n".join([
        *(named if name else []),
        f"# {setup}",
        *([extra] if extra else []),
        "#",
        "# Using devices",
        *(f"#  Rank {rank:2} {group}Pid   4711 on      node1 device {rank:2} [0000:{rank:02x}:00] "
          "NVIDIA H100" for rank in range(ranks)),
        "#",
        "#                                  out-of-place                       in-place          ",
        f"# {'  '.join(heads)}",
        "#  (B)  (elements)    (us)  (GB/s)  (GB/s)      (us)  (GB/s)  (GB/s)",
        *rows,
        f"# Out of bounds values : {bounds}",
        "# Avg bus bandwidth    : 21.5 ",
        "#", "",
    ])  # fmt: skip


def row(
    nbytes: int = MIB, out: float = 40.0, inside: float = 41.0, wrong: str = "0",
    middle: str = "float     sum      -1", count: int | None = None, factor: float = 1.5,
) -> str:  # fmt: skip
    """A row of nccl-tests. factor: busbw / algbw."""
    rates = [(t, nbytes / t / 1e3) for t in (out, inside)]
    sides = [f"  {t:7.2f}  {r:6.2f}  {r * factor:6.2f}  {wrong:>6}" for t, r in rates]
    return f"{nbytes:12}  {count or nbytes // 4:12}  {middle}{''.join(sides)}"


def osu(title: str, *rows: str, heads: str = "Size       Avg Latency(us)", dtype: str = "") -> str:
    """What a benchmark of OSU's prints."""
    typed = f"# Datatype: {dtype}.\n" if dtype else ""
    return f"\n# OSU MPI{title} v7.4\n{typed}# {heads}\n" + "".join(f"{row}\n" for row in rows)


def read(folder: Path, text: str, name: str = "a-n4.log") -> Run:
    """The run in a log of this text."""
    path = folder / name
    path.write_text(text)
    return sources.read(path)


def seconds(run: Run) -> list[float]:
    """Of each result, in order."""
    return [each.summary.median_seconds for each in run.results if each.summary]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = int(str(end.code))
    return code, *capsys.readouterr()


# --- nccl-tests -----------------------------------------------------------------------------------


def test_a_row_of_nccl_tests_is_two_cases_with_its_own_identity(tmp_path: Path) -> None:
    """Out of and in place; sizes, types and definitions as nccl-tests has them, none of ours."""
    run = read(tmp_path, nccl(row(), row(4 * MIB, 80, 81)))
    assert seconds(run) == pytest.approx([40e-6, 41e-6, 80e-6, 81e-6])
    first, second, *_ = (each.case for each in run.results)
    assert first == a_case(
        backend="nccl", provider="nccl-tests", device="cuda", nbytes=MIB, count=MIB // 4,
        in_place=False, issue="pipelined", start="none", depth=20, world_size=4,
        ranks_per_host=(4,), buffers="nccl-tests", rank_reduction="mean", statistic="mean",
        time_definition="loop of calls with one wait at its end / calls",
    )  # fmt: skip
    assert second == replace(first, in_place=True)
    (launch,) = run.launches
    assert (launch.library, launch.world_size) == ("NCCL 2.28.8", 4)
    assert launch.ranks[3] == {"hostname": "node1", "gpu_name": "NVIDIA H100"}
    (line, *_) = lines.lines(run)
    assert line.busbw == pytest.approx(MIB / 40e-6 * 1.5)
    assert [each.checks for each in run.results] == [1] * 4


OLD_SETUP = (
    "nThread: 1 nGpus: 4 minBytes: 8 maxBytes: 64 step: 2(factor) warmupIters: 5 iters: 10 "
    "validation: 1"
)
PER_ITERATION = [
    "size", "count", "type", "redop", "root",
    *2 * ["time", "algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%"],
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name", "differs"),
    [
        # Before 2.13: no test's name, no root, an error in the place of a count.
        (nccl(row(wrong="2e-07", middle="float     sum"), name="", group="", setup=OLD_SETUP,
              heads=["size", "count", "type", "redop",
                     *2 * ["time", "algbw", "busbw", "error"]]),
         "all_reduce_perf.log", {"depth": 10}),
        # The same of a test that does not reduce: no redop either, or a blank one.
        (nccl(row(wrong="N/A", middle="float", count=MIB // 16, factor=0.75), name="", group="",
              heads=["size", "count", "type", *2 * ["time", "algbw", "busbw", "error"]]),
         "all_gather_perf.log",
         {"operation": "all_gather", "reduce_op": None, "count": MIB // 16}),
        (nccl(row(middle="half               -1", count=MIB // 8), name="all_gather_perf"), "x",
         {"operation": "all_gather", "reduce_op": None, "dtype": "float16", "count": MIB // 8}),
        (nccl(row(middle="bfloat16    none       2"), name="/opt/nccl/broadcast_perf_mpi"), "x",
         {"operation": "broadcast", "reduce_op": None, "root": 2, "dtype": "bfloat16"}),
        (nccl(row(middle="int8    mulsum   -1"), name="sendrecv_perf"), "x",
         {"operation": "sendrecv", "reduce_op": "mulsum", "dtype": "int8"}),
        # -C, -S, -I, -z, -G, -u
        (nccl(row(), heads=[h.replace("time", "cputime") for h in NCCL_HEADS]), "x",
         {"time_definition": "loop of calls with one wait at its end / calls, until the last is "
                             "issued"}),
        (nccl(row() + "  2026-07-09 16:03:21", heads=[*NCCL_HEADS, "timestamp"]), "x", {}),
        (nccl(re.sub(r" 0(?=\s|$)", " 0  1.0  9.0  8.0  4.5", row()), heads=PER_ITERATION), "x",
         {}),
        (nccl(row(), extra="# Blocking Enabled: wait for completion and barrier after each "
                           "collective"), "x",
         {"issue": "isolated", "start": "barrier", "depth": 1,
          "time_definition": "loop of calls, each with a wait and a barrier / calls"}),
        (nccl(row(), extra="# Blocking Enabled: wait after each inner iteration (-m), no barrier "),
         "x", {"issue": "isolated", "depth": 1,
               "time_definition": "loop of calls, each with a wait / calls"}),
        (nccl(row(), setup="nThread 2 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: "
                           "5 iters: 20 agg iters: 3 validation: 0 graph: 7 unalign: 1"), "x",
         {"depth": 60, "buffers": "nccl-tests, 1 elements off",
          "time_definition": "loop of calls with one wait at its end / calls, in 7 launches of a "
                             "CUDA graph"}),
    ],
    ids=["2.12", "all_gather of 2.12", "blank redop", "root", "sendrecv", "-C", "-S", "-I", "-z 1",
         "-z 2", "-G and -u"],
)  # fmt: skip
def test_columns_and_options_of_all_releases_are_known(
    tmp_path: Path, text: str, name: str, differs: dict[str, Any]
) -> None:
    """Columns that a release lacks or adds move no figure; options that change what is measured
    are in the identity."""
    first = read(tmp_path, nccl(row())).results[0].case
    run = read(tmp_path, text, name)
    assert [each.case for each in run.results] == [
        replace(first, **{"in_place": place, **differs}) for place in (False, True)
    ]
    assert seconds(run) == pytest.approx([40e-6, 41e-6])
    assert not any(each.wrong for each in run.results)


def test_other_lines_between_the_rows_are_left_out(tmp_path: Path) -> None:
    """NCCL's own output, mpirun's and its tags, and sizes below one block a rank."""
    noisy = nccl("node1:17:17 [0] NCCL INFO Launch mode Parallel", row(), "12 more processes have",
                 "           0             0     float     sum      -1    34.27    0.00    0.00  "
                 "  N/A    33.57    0.00    0.00    N/A")  # fmt: skip
    tagged = "\n".join(f"[1,0]<stdout>: {line}" for line in noisy.splitlines())
    assert read(tmp_path, f"[1,0]<stderr>: no X\n{tagged}\n").results == (
        read(tmp_path, nccl(row())).results
    )


def test_ranks_of_several_groups_are_those_of_one(tmp_path: Path) -> None:
    """Split communicators: the world is one group's; ranks that a list lacks are in busbw."""
    text = nccl(row(), ranks=8)
    for rank in range(4, 8):
        text = text.replace(f"Rank  {rank} Group  0", f"Rank  {rank} Group  1")
    assert read(tmp_path, text).results[0].case.world_size == 4
    assert read(tmp_path, nccl(row(), ranks=3), "x").results[0].case.world_size == 4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (nccl(row(wrong="3"), row(4 * MIB)), [True, True, False, False]),
        (nccl(row(wrong="N/A"), row(4 * MIB), bounds="2 FAILED"), [True] * 4),
        (nccl(row(wrong="1e-07", middle="float     sum"), name="", bounds="1 FAILED",
              heads=["size", "count", "type", "redop", *2 * ["time", "algbw", "busbw", "error"]]),
         [True] * 2),
    ],
    ids=["#wrong", "not of which", "an old release"],
)  # fmt: skip
def test_what_the_log_calls_wrong_is_wrong(tmp_path: Path, text: str, found: list[bool]) -> None:
    """A count above 0 marks its row, a failed total all rows where none is named."""
    run = read(tmp_path, text, "all_reduce_perf")
    assert [bool(each.wrong) for each in run.results] == found
    assert [f.code for f in run.findings if f.severity == "error"] == ["wrong-result"] * sum(found)


def test_a_time_below_what_is_printed_is_none(tmp_path: Path) -> None:
    """0.00 µs: the case is there, with the reason why it has no figure."""
    zero = read(tmp_path, nccl(row(8, 0.004, 5)))
    assert [each.reason for each in zero.results] == [
        "the log says 0: less than it can print",
        None,
    ]


def the_json(**other: Any) -> str:
    """What nccl-tests writes with -J, of the rows above."""

    def side(time: float) -> dict[str, float]:
        return {"time": time, "alg_bw": 1.0, "bus_bw": 1.5, "nwrong": 0.0}

    known: dict[str, Any] = {
        "version": 3, "start_time": "2026-07-09 16:03:21",
        "args": ["./build/all_reduce_perf", "-b", "8", "-g", "4", "-J", "x.json"],
        "env": ["NCCL_ALGO=Ring", "AWS_SECRET_ACCESS_KEY=hidden", "PATH=/bin"],
        "nccl_version": 22808,
        "config": {
            "nthreads": 1, "ngpus": 4, "minimum_bytes": 8, "maximum_bytes": 8, "warmup_iters": 1,
            "iterations": 20, "aggregated_iterations": 1, "validation": 1, "graph": 0,
            "blocking_collectives": "false",
            "devices": [{"rank": 0, "group": 0, "pid": 4711, "hostname": "node1", "device": 0,
                         "device_hex": "0000:18:00", "device_info": "NVIDIA H100"}],
        },
        "results": [{"size": MIB, "count": MIB // 4, "type": "float", "redop": "sum",
                     "root": "    -1", "out_of_place": side(40.0), "in_place": side(41.0),
                     "actual_iterations": 20, "experiment_name": ""}],
        "out_of_bounds": {"count": 0, "okay": "true"}, "end_time": "2026-07-09 16:03:29",
    }  # fmt: skip
    return json.dumps({**known, **other})


def test_the_json_of_nccl_tests_says_what_its_text_says(tmp_path: Path) -> None:
    """The same cases and figures; of the environment only what steers NCCL."""
    run, text = read(tmp_path, the_json()), read(tmp_path, nccl(row()))
    assert [each.case for each in run.results] == [each.case for each in text.results]
    assert seconds(run) == pytest.approx(seconds(text))
    assert run.launches[0].ranks[2]["variables"] == {"NCCL_ALGO": "Ring"}
    assert b'"hidden"' not in codec.encode(run)


@pytest.mark.parametrize(
    ("args", "differs"),
    [
        (["-a", "3"], {"rank_reduction": "max"}),
        (["--average=0"], {"rank_reduction": "rank 0"}),
        (["-a2", "-z", "3"], {"rank_reduction": "min", "issue": "isolated", "start": "barrier",
                              "depth": 1, "time_definition": "calls with a wait each, less the "
                              "barriers between / calls"}),
    ],
)  # fmt: skip
def test_the_command_line_in_the_json_is_in_the_identity(
    tmp_path: Path, args: list[str], differs: dict[str, str]
) -> None:
    """-a and -z, in any way that getopt takes them."""
    first = read(tmp_path, the_json()).results[0].case
    run = read(tmp_path, the_json(args=["all_reduce_perf", *args]))
    assert run.results[0].case == replace(first, **differs)


# --- OSU ------------------------------------------------------------------------------------------

FULL = "Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations"


@pytest.mark.parametrize(
    ("text", "differs", "microseconds"),
    [
        (osu(" Allreduce Latency Test", "1024          15.50", dtype="MPI_INT"),
         {"dtype": "int32", "count": 256}, 15.5),
        (osu(" Allreduce Latency Test", "1024          15.50"), {"count": 256}, 15.5),
        (osu(" Allgather Latency Test", "1024     15.50    14.00    17.00   1000", heads=FULL),
         {"operation": "all_gather", "reduce_op": None, "dtype": "int8", "nbytes": 4096,
          "count": 1024}, 15.5),
        (osu(" All-to-All Personalized Exchange Latency Test", "1024     15.50     Pass",
             heads="Size       Avg Latency(us)          Validation"),
         {"operation": "all_to_all", "reduce_op": None, "dtype": "int8", "nbytes": 4096,
          "count": 1024}, 15.5),
        (osu(" Reduce_scatter Latency Test", "1024     15.50"),
         {"operation": "reduce_scatter", "count": 64}, 15.5),
        (osu("-CUDA Scatter Latency Test", "1024     15.50", dtype="MPI_CHAR"),
         {"operation": "scatter", "device": "cuda", "reduce_op": None, "dtype": "int8",
          "root": 0, "nbytes": 4096, "count": 1024}, 15.5),
        (osu(" Barrier Latency Test", "            15.50", heads="Avg Latency(us)"),
         {"operation": "barrier", "reduce_op": None, "dtype": "int8", "nbytes": 0, "count": 0},
         15.5),
        (osu(" Latency Test", "1024       1.50", heads="Size          Latency (us)"),
         {"operation": "send_recv", "reduce_op": None, "dtype": "int8", "count": 1024,
          "start": "none", "world_size": 2, "time_definition": "half the round trip",
          "rank_reduction": "rank 0"}, 1.5),
        (osu(" Bi-Directional Bandwidth Test", "1024       4096.00       4090.00       4100.00",
             heads="Size      Bandwidth (MB/s) P50 Tail BW(MB/s) P99 Tail BW(MB/s)"),
         {"operation": "bidirectional", "reduce_op": None, "dtype": "int8", "count": 1024,
          "start": "none", "world_size": 2, "rank_reduction": "rank 0", "async_op": True,
          "issue": "pipelined", "depth": 0,
          "time_definition": "window of messages and one answer / messages"}, 0.5),
    ],
    ids=["a datatype", "an old release", "-f", "-c", "reduce_scatter", "CUDA", "barrier", "latency",
         "bandwidth"],
)  # fmt: skip
def test_a_row_of_osu_has_its_own_identity_and_our_sizes(
    tmp_path: Path, text: str, differs: dict[str, Any], microseconds: float
) -> None:
    """A block's size becomes the total buffer's, a rate a time; the mean over ranks stays one."""
    known = a_case(
        backend="mpi", provider="osu", nbytes=1024, in_place=False, world_size=4,
        ranks_per_host=(), buffers="osu", rank_reduction="mean", statistic="mean",
    )  # fmt: skip
    run = read(tmp_path, text)
    (result,) = run.results
    assert result.case == replace(known, **differs)
    assert seconds(run) == pytest.approx([microseconds * 1e-6])
    told = [note.sentence for note in run.findings]
    assert any("4 times as large" in each for each in told) == (result.case.nbytes == 4096)


def test_osu_tells_extremes_over_ranks_and_failed_validations(tmp_path: Path) -> None:
    """-f: the fastest rank's mean and the calls; Fail is a wrong result."""
    heads = f"{FULL}          Validation"
    run = read(tmp_path, osu(" Reduce Latency Test", "4   2.00   1.00   3.00   1000   Fail",
                             heads=heads))  # fmt: skip
    (result,) = run.results
    assert result.summary is not None
    assert (result.summary.rank_min_seconds, result.summary.repetitions) == (1e-6, 1000)
    assert result.summary.max_seconds is None
    assert [wrong.got for wrong in result.wrong] == ["a validation that failed"]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("osu-n8.txt", 8), ("w16_allreduce.log", 16), ("np4.out", 4), ("nodes-n2/osu.txt", 2)],
)
def test_the_number_of_ranks_is_in_the_name(tmp_path: Path, name: str, ranks: int) -> None:
    """Of the file, else of its folder; and the run says that it is from there."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    run = read(tmp_path, osu(" Allreduce Latency Test", "4   2.00"), name)
    assert run.results[0].case.world_size == ranks
    assert f"{ranks} is from the name" in run.findings[0].sentence


ALLREDUCE = osu(" Allreduce Latency Test", "4     2.00", "8     2.50")


# --- logs as people have them ---------------------------------------------------------------------

INFO = "node1:4711:4790 [0] NCCL INFO comm 0x55 rank 0 nranks 4 busId 18000 - Init COMPLETE"
# How a line reaches a file: what stands before it, and what else is done to the text.
PREFIXES: dict[str, Callable[[int, str], str]] = {
    "plain": lambda i, line: line,
    "srun --label": lambda i, line: f" 0: {line}",
    "mpirun --tag-output": lambda i, line: f"[1,0]<stdout>:{line}",
    "prterun": lambda i, line: f"[prterun-node1-4711@1,0]<stdout>: {line}",
    "kubernetes": lambda i, line: f"2026-07-09T16:03:{i % 60:02}.{i:09}Z stdout F {line}",
    "kubectl --prefix": lambda i, line: f"[pod/nccl-launcher-x7k2/mpi] {line}",
    "stern": lambda i, line: f"nccl-launcher-x7k2 mpi {line}",
    "torchrun": lambda i, line: f"[default0]:{line}",
    "two": lambda i, line: f"nccl-0 | 16:03:{i % 60:02} [rank0]: {line}",
    "docker": lambda i, line: f"2026-07-09T16:03:00.{i:03}Z {line}",
    "colours": lambda i, line: f"\x1b[3{i % 8}mnccl-launcher\x1b[0m \x1b[1m{line}\x1b[0m",
    "markdown": lambda i, line: f"    {line}",
    "quoted": lambda i, line: f"> {line}",
    "list": lambda i, line: f" \t {line}\t",
    "escaped": lambda i, line: line.replace("# ", "\\# ", 1) if line.startswith("#") else line,
}
SAVED: dict[str, Callable[[str], bytes]] = {
    "utf-8": str.encode,
    "bom": lambda text: text.encode("utf-8-sig"),
    "crlf": lambda text: text.replace("\n", "\r\n").encode(),
    "utf-16": lambda text: text.replace("\n", "\r\n").encode("utf-16"),
    "utf-16 without bom": lambda text: text.encode("utf-16-le"),
}


def interleaved(draw: random.Random, lines: Iterable[str]) -> list[str]:
    """The lines with those of NCCL between them, and some rows written in two or three pieces."""
    out: list[str] = []
    for line in lines:
        out += [INFO] * (draw.random() < 0.2)
        ends = [m.end() for m in re.finditer(r"(?: -1|  0|N/A|e-07)(?=  )", line)]
        for end in reversed(ends if line[:1] == " " else []):
            if draw.random() < 0.3:
                line = f"{line[:end]}{INFO}\n{INFO}\n{line[end:]}"
        out += line.split("\n")
    return out


def mutated(draw: random.Random, text: str) -> bytes:
    """This log as somebody may have it."""
    lines = interleaved(draw, text.split("\n")) if "nThread" in text else text.split("\n")
    prefix = PREFIXES[draw.choice([*PREFIXES])]
    lines = [prefix(i, line) for i, line in enumerate(lines)]
    if draw.random() < 0.3:
        lines = ["Run on Monday:", "", "```text", *lines, "```", "That is slow."]
    return SAVED[draw.choice([*SAVED])]("\n".join(lines))


def old(*rows: str) -> str:
    """What a release before 2.13 prints."""
    return nccl(
        *rows,
        name="",
        group="",
        heads=["size", "count", "type", "redop", *2 * ["time", "algbw", "busbw", "error"]],
    )


SIZES = [(8, 9.5), (65536, 12.25), (MIB, 40.0), (64 * MIB, 700.5)]
CLEAN = {
    "nccl-tests": nccl(*(row(n, t, t + 1) for n, t in SIZES)),
    "wrong": nccl(*(row(n, t, t + 1, wrong="7") for n, t in SIZES)),
    "not checked": nccl(*(row(n, t, t + 1, wrong="N/A") for n, t in SIZES)),
    "2.12": old(*(row(n, t, t + 1, wrong="1e-07", middle="float     sum") for n, t in SIZES)),
    "rccl-tests": nccl(*(row(n, t, t + 1) for n, t in SIZES), name="").replace(
        "# Using", "rccl-tests: Version develop:abc1234\n# Using"),
    "osu": osu(" Allreduce Latency Test", *(f"{n}  {t:.2f}" for n, t in SIZES))
    + osu(" Non-blocking Allreduce Latency Test", "4  2.00  1.50", heads="Size  Overall(us)  Pure")
    + osu(" Latency Test", "4  1.50", "8  1.75", heads="Size          Latency (us)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CLEAN)
def test_a_log_that_was_copied_is_read_as_the_clean_one(tmp_path: Path, kind: str) -> None:
    """Any prefix, noise, markup and encoding, over 60 seeded draws: the same results."""
    clean = read(tmp_path, CLEAN[kind]).results
    assert len(clean) == (6 if kind == "osu" else 8)
    path = tmp_path / "b-n4.log"
    for seed in range(60):
        path.write_bytes(mutated(random.Random(f"{kind} {seed}"), CLEAN[kind]))
        assert sources.read(path).results == clean, seed


@pytest.mark.parametrize("kind", CLEAN)
def test_a_cut_log_has_the_figures_of_the_whole_one_or_none(tmp_path: Path, kind: str) -> None:
    """Without its first lines, its last bytes or both: no figure that the whole log has not, no
    exception but InvalidRun; whole rows are there as long as the head of the log is."""
    clean = {(r.case.operation, r.case.nbytes, r.case.in_place): r.summary
             for r in read(tmp_path, CLEAN[kind]).results}  # fmt: skip
    path = tmp_path / "b-n4.log"
    rows = 0
    for seed in range(120):
        draw = random.Random(f"cut {kind} {seed}")
        data = mutated(draw, CLEAN[kind])
        start = draw.choice([0, draw.randrange(len(data))])
        path.write_bytes(data[start : draw.choice([len(data), draw.randrange(len(data) + 1)])])
        try:
            found = sources.read(path, Hints("all_reduce", 4)).results
        except InvalidRun:
            continue
        for each in found:
            known = clean[each.case.operation, each.case.nbytes, each.case.in_place]
            assert each.summary is not None
            assert known is not None
            assert each.summary.median_seconds == known.median_seconds
            rows += 1
    assert rows > 100


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (r"(?s)^.*in-place *\n", nccl(row(), row(4 * MIB, 80, 81))),
        (r"(?s)^.*#  \(B\)[^\n]*\n", nccl(row(), row(4 * MIB, 80, 81))),
        (
            r"(?s)^.*#  \(B\)[^\n]*\n",
            old(
                row(wrong="2e-07", middle="float     sum"),
                row(4 * MIB, 80, 81, "2e-07", "float     sum"),
            ),
        ),
        (r"(?s)^.*device  2[^\n]*\n", nccl(row(), row(4 * MIB, 80, 81))),
        (r"(?s)\n# Out of bounds.*", nccl(row(), row(4 * MIB, 80, 81))),
        (r"(?m)^#", nccl(row(), row(4 * MIB, 80, 81))),
    ],
    ids=["heads", "rows", "rows of 2.12", "one device", "no end", "no #"],
)
def test_a_part_of_a_log_is_read(tmp_path: Path, cut: str, text: str) -> None:
    """The rows tell the test and the number of ranks; what is missing is told."""
    run = read(tmp_path, re.sub(cut, "", text, count=0 if cut == "(?m)^#" else 1), "x")
    assert seconds(run) == pytest.approx([40e-6, 41e-6, 80e-6, 81e-6])
    assert {(r.case.operation, r.case.world_size) for r in run.results} == {("all_reduce", 4)}
    assert not any(each.wrong for each in run.results)


@pytest.mark.parametrize(
    ("above", "below", "name", "hints", "source"),
    [
        ("$ mpirun -np 4 \\\n  -x A=b ./build/alltoall_perf -b 8 -g 1\n", "", "x", Hints(),
         "the command above"),
        ("srun -N 2 --ntasks-per-node=1 alltoall_perf_mpi -g 2 -b 8\n", "", "x", Hints(),
         "the command above"),
        ("", "# Collective test concluded: alltoall_perf_mpi\n", "x", Hints(), None),
        ("", "", "x", Hints("all_to_all"), "--op"),
        ("./all_gather_perf -g 4\n", "", "x", Hints("all_to_all", 4), "--op"),
        ("", "", "n4-alltoall_perf.txt", Hints(), "the file's name"),
    ],
)  # fmt: skip
def test_a_test_without_a_name_is_named_by_what_is_around_it(
    tmp_path: Path, above: str, below: str, name: str, hints: Hints, source: str | None
) -> None:
    """The command above, the line below, the file's name or --op, which wins over what is only
    inferred; the run says where the name is from."""
    text = nccl(row(middle="float    none      -1", count=MIB // 16, factor=0.75), name="")
    path = tmp_path / name
    for devices in (True, False):
        text = text if devices else re.sub(r"#  Rank.*\n", "", text)
        path.write_text(above + text + below)
        run = sources.read(path, hints)
        assert {(r.case.operation, r.case.world_size) for r in run.results} == {("all_to_all", 4)}
        told = [f.sentence for f in run.findings if "does not name its test" in f.sentence]
        expected = f"the log does not name its test: alltoall_perf is from {source}"
        assert told == ([expected] if source else [])


def test_tests_that_are_not_read_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with tests of several kinds: what is read is shown, what is not is named, in compare
    too."""
    monkeypatch.chdir(tmp_path)
    Path("nccl.log").write_text(
        nccl(row(), name="hypercube_perf") + nccl(row()) + nccl(name="broadcast_perf")
        + nccl(row(), row(8).replace("float", "float  sum x"), name="all_reduce_perf")
    )  # fmt: skip
    code, out, _ = said(capsys, "show", "nccl.log")
    assert code == 0
    assert "a test is left out, for it is of hypercube_perf, which ddpbench does not read" in out
    assert "a test is left out, for it has no row of results of broadcast_perf" in out
    assert "NOTE (left-out): line 65 is damaged: '8             2  float  sum x" in out
    Path("osu-n4.txt").write_text(
        ALLREDUCE + osu(" Non-blocking Allreduce Latency Test", "4  2.00") + ALLREDUCE
    )
    Path("old-n4.txt").write_text(ALLREDUCE)
    code, out, _ = said(capsys, "compare", "old-n4.txt", "osu-n4.txt")
    assert "NEW is only a part of osu-n4.txt: a test is left out, for it is of 'MPI Non-bl" in out
    assert len(sources.read(Path("osu-n4.txt")).launches) == 2


def test_several_tests_at_once_in_one_log_are_refused(tmp_path: Path) -> None:
    """nccl-tests without MPI=1 under mpirun: each process is a test of one GPU."""
    lone = nccl(row(factor=0), ranks=1, setup=OLD_SETUP, name="").split("\n")
    mixed = "\n".join(line for both in zip(lone, lone, strict=True) for line in both)
    with pytest.raises(InvalidRun, match="lists a rank twice: several tests wrote into it"):
        read(tmp_path, mixed)


def test_rates_that_disagree_are_no_test(tmp_path: Path) -> None:
    """Rows of 8 and of 16 ranks in one table without devices are not averaged."""
    text = re.sub(r"#  Rank.*", "", nccl(row(factor=1.75), row(factor=1.875)))
    with pytest.raises(InvalidRun, match="has a table whose rows differ in busbw / algbw"):
        read(tmp_path, text, "x")


@pytest.mark.parametrize(
    ("above", "name", "hints", "ranks", "source"),
    [
        ("$ mpirun -n 16 --bind-to core \\\n> ./osu_benchmarks-7/osu_allreduce -f\n", "x", Hints(),
         16, "the command above"),
        ("mpirun -np 8 run_all.sh\n", "x", Hints(), 8, "the command above"),
        ("srun --ntasks=12 ./osu_allreduce\n", "n4.txt", Hints(), 12, "the command above"),
        ("srun -N 3 --ntasks-per-node 5 osu_allreduce\n", "x", Hints(), 15, "the command above"),
        ("mpiexec -n 2 ./osu_latency\n", "n4.txt", Hints(), 4, "the name"),
        ("mpirun -n 16 ./osu_allreduce\n", "n4.txt", Hints(ranks=32), 32, "--ranks"),
    ],
)  # fmt: skip
def test_ranks_of_osu_are_in_the_command_an_option_or_the_name(
    tmp_path: Path, above: str, name: str, hints: Hints, ranks: int, source: str
) -> None:
    """What is typed wins over what is inferred; the command of another benchmark tells nothing."""
    path = tmp_path / name
    path.write_text(above + ALLREDUCE)
    run = sources.read(path, hints)
    assert run.results[0].case.world_size == ranks
    assert any(f"{ranks} is from {source}" in each.sentence for each in run.findings)


def test_a_table_of_osu_without_its_title_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By --op, on the command line."""
    path = tmp_path / "x.txt"
    path.write_text("9  1.00\n" + ALLREDUCE.partition("v7.4\n")[2])
    code, out, _ = said(capsys, "show", str(path), "--op", "all_reduce", "--ranks", "4")
    assert code == 0
    assert "all_reduce  float32  sum  out of place  4 ranks  cpu" in out
    assert "rows above line 2 are left out: their head is missing" in out


def test_osu_buffers_are_in_the_identity(tmp_path: Path) -> None:
    """From device to host is another measurement than the other way, or on hosts only."""
    cases = set()
    for send, receive in (("DEVICE", "HOST"), ("HOST", "DEVICE"), ("HOST", "HOST")):
        line = f"# Send Buffer on {send} (x) and Receive Buffer on {receive} (x)\n# Size  "
        text = osu("-CUDA Latency Test", "8  1.75", heads="Size          Latency (us)")
        case = read(tmp_path, text.replace("# Size  ", line)).results[0].case
        cases.add((case.device, case.buffers))
    assert cases == {("cuda", "osu, device to host"), ("cuda", "osu, host to device"),
                     ("cpu", "osu")}  # fmt: skip


def record(inside: int, time: float, **other: Any) -> dict[str, Any]:
    """What rccl-tests writes with -x, of the rows above."""
    return {
        "numCycle": 0, "name": "AllReduce", "nodes": 1, "ranks": 4, "ranksPerNode": 4,
        "gpusPerRank": 1, "size": MIB, "type": "float", "redop": "sum", "inPlace": inside,
        "time": time, "algBw": 1.0, "busBw": 1.5, "wrong": "0", **other,
    }  # fmt: skip


def test_rccl_tests_are_read_as_such(tmp_path: Path) -> None:
    """Its text, its JSON in a list or one record a line, and the JSON that it has from nccl-tests
    tell the same; never comparable with nccl-tests."""
    amd = nccl(row(), name="").replace("NVIDIA H100", "AMD Instinct MI300X")
    text = read(tmp_path, amd)
    assert text.launches[0].library == "RCCL of unknown version"
    cases = [replace(each.case, depth=0, ranks_per_host=()) for each in text.results]
    assert {case.provider for case in cases} == {"rccl-tests"}
    records = [record(0, 40.0), record(1, 41.0), record(0, 1.0, size=0)]
    short = [
        {("#wrong" if k == "wrong" else k): v for k, v in {**each, "gpus": 4}.items()
         if k not in ("ranks", "ranksPerNode", "nodes", "gpusPerRank")} for each in records
    ]  # fmt: skip
    for form in (json.dumps(records), "\n".join(map(json.dumps, short))):
        run = read(tmp_path, form)
        assert [each.case for each in run.results] == cases
        assert seconds(run) == pytest.approx([40e-6, 41e-6])
    cut = read(tmp_path, json.dumps(records)[:-100])
    assert cut.results == read(tmp_path, json.dumps(records[:2])).results
    assert "the last record is not whole" in cut.findings[0].sentence
    (result,) = read(tmp_path, json.dumps([record(0, 1.0, wrong="3")])).results
    assert result.wrong
    new = read(tmp_path, the_json().replace("NVIDIA H100", "AMD Instinct MI300X"))
    assert new.results[0].case.provider == "rccl-tests"


@pytest.mark.parametrize(
    ("place", "side"), [("in-place", True), ("out-of-place", False)], ids=["-O 0", "-O 1"]
)
def test_rccl_tests_of_one_side_and_with_more_columns_are_read(
    tmp_path: Path, place: str, side: bool
) -> None:
    """One place only, and the algorithm behind its columns."""
    heads = [*NCCL_HEADS[:9], "algo", "proto", "channels"]
    one_side = re.sub(r"(sum +-1(?: +\S+){4}).*", r"\1    RING      LL         4", row())
    text = nccl(one_side, heads=heads)
    run = read(tmp_path, re.sub("out-of-place.*in-place", place, text))
    assert [(each.case.in_place, each.case.nbytes) for each in run.results] == [(side, MIB)]
    assert seconds(run) == pytest.approx([40e-6])


# --- what cannot be read --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.log", "", "is empty"),
        ("a.log", "\n \n", "is empty"),
        ("a.log", "\x89PNG\x00\x01", "is no log that ddpbench reads (JSON of nccl-tests (-J), "),
        ("a.json", '{"benchmarks": []}', "is no log that ddpbench reads"),
        ("a.log", nccl(row(middle="float none -1", count=MIB // 16, factor=0.75), name=""),
         "which may be all_gather, all_to_all: add --op, as --op all_gather"),
        ("a.log", re.sub(r"#  Rank.*", "", nccl(row(8), name="")),
         "which may be all_reduce, reduce_scatter, sendrecv: add --op, as --op all_reduce"),
        ("a.log", re.sub(r"#  Rank.*", "", nccl(row(8))),
         "does not tell the number of ranks of all_reduce: add --ranks, as --ranks 8"),
        ("n8_all_gather_perf.log", nccl(row(), name="", ranks=0),
         "has rates that do not fit all_gather on 8 ranks (busbw / algbw is 1.5): name the test "
         "with --op and the number of ranks with --ranks"),
        ("a.log", nccl(row()).replace("Rank  1", "Rank  0"), "lists a rank twice: several tests"),
        ("a.log", nccl(row(), name="hypercube_perf"), "is of hypercube_perf, which ddpbench does"),
        ("a.log", nccl(), "has no row of results of all_reduce_perf"),
        ("a.log", nccl(row()[:-20]), "line 14 is damaged: '"),
        ("a.log", nccl(row().replace("40.00", "4?.00")), "line 14 is damaged: '"),
        ("a.log", nccl(row().replace("40.00", "nan  ")), "line 14 is damaged: '"),
        ("a.log", "# nThread\n", "has no row of results of the test at line 1"),
        ("a.json", the_json()[:-40], "Unterminated string"),
        ("a.json", the_json(end_time=None), "Expected `str`, got `null` - at `$.end_time`"),
        ("a.json", the_json(results={}), "Expected `array`, got `object` - at `$.results`"),
        ("a.json", the_json().replace('"nthreads": 1', '"nthreads": 0'), "$.config has 0 GPUs for"),
        ("a.json", the_json().replace(f'"size": {MIB}', '"size": 1' + 400 * "0"),
         "has a size that is not from 1 to 2**63 bytes"),
        ("a.json", json.dumps([record(0, 1.0, ranks=0)]), "is of 0 ranks"),
        ("a.json", json.dumps([record(0, 1.0, name="AlltoAllv")]), "is of AlltoAllv, which ddpb"),
        ("a.json", json.dumps([record(0, 1.0, size="x")]), "Expected `int`, got `str` - at `$"),
        ("a.json", the_json(args=["all_reduce_perf", "-a", "x"]), "$.args has -a 'x', which"),
        ("a.txt", ALLREDUCE, "has no number of ranks, for OSU prints none: add --ranks, as --ranks "
         "8, or put it into the name of the file or of its folder, as a-n8.txt"),
        ("n4.txt", osu(" Allreduce Latency Test", "8  2.50")[:-2], "line 4 is damaged: '8  2.5'"),
        ("n4.txt", osu(" Allreduce Latency Test", "8  "), "line 4 is damaged: '8'"),
        ("n4.txt", osu(" Allreduce Latency Test", "8  x"), "line 4 is damaged: '8  x'"),
        ("n4.txt", ALLREDUCE.partition("Test v7.4\n")[2], "has a table at line 1 without its line "
         "'# OSU MPI … Test': name its test with --op, as --op all_reduce"),
        ("n4.txt", osu(" Allreduce Latency Test"), "has no row of results below line 2: the test"),
        ("n4.txt", osu(" Non-blocking Allreduce Latency Test", "4  2.00"),
         "is of 'MPI Non-blocking Allreduce Latency', which ddpbench does not read (it reads of "
         "OSU MPI: Allreduce Latency"),
        ("n4.txt", osu(" Bandwidth Test", "4  0.00", heads="Size      Bandwidth (MB/s)"),
         "line 4 is damaged"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, sentence: str
) -> None:
    """Which file, and what it lacks, on either side of compare and in show; exit code 3; the file
    stays as it was."""
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1", errors="replace") if "PNG" in text else text.encode())
    before = path.read_bytes()
    good = tmp_path / "good-n2.txt"
    good.write_text(ALLREDUCE)
    for words in (("show", path), ("compare", good, path), ("compare", path, good)):
        code, out, err = said(capsys, *map(str, words))
        assert (code, out) == (3, "")
        assert re.fullmatch(r"ddpbench: [^\n]+\n", err)
        assert str(path) in err
        assert sentence in err
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "text", [nccl(row(), row(4 * MIB)), the_json(), ALLREDUCE], ids=["nccl", "json", "osu"]
)
def test_no_cut_makes_another_figure(tmp_path: Path, text: str) -> None:
    """A log that ends anywhere is refused with a sentence, or its whole rows are what they were."""
    whole = read(tmp_path, text).results
    cuts = [*range(0, len(text) - 60, 9), *range(len(text) - 60, len(text))]
    for end in cuts:
        try:
            rows = read(tmp_path, text[:end]).results
        except InvalidRun:
            continue
        assert rows == whole[: len(rows)]


# --- compare and show -----------------------------------------------------------------------------


def launches(folder: Path, factor: float, make: Callable[[float], str], suffix: str) -> list[str]:
    """Six logs whose times lie around these."""
    folder.mkdir()
    draw = random.Random(factor)
    texts = [make(factor * draw.uniform(0.998, 1.002)) for _ in range(6)]
    for i, text in enumerate(texts):
        (folder / f"{i}-n4{suffix}").write_text(text)
    return texts


@pytest.mark.parametrize(
    ("make", "suffix"),
    [
        (lambda factor: nccl(row(out=400 * factor, inside=410)), ".log"),
        (lambda factor: osu(" Reduce Latency Test", f"4  {400 * factor:.2f}", "8  410.0"), ".txt"),
    ],
    ids=["nccl-tests", "osu"],
)  # fmt: skip
def test_folders_of_logs_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    make: Callable[[float], str], suffix: str,
) -> None:  # fmt: skip
    """Each log is a launch; six of one test in one file are too. What did not change is the
    SAME."""
    monkeypatch.chdir(tmp_path)
    for name, factor in (("old", 1.0), ("new", 1.1)):
        texts = launches(Path(name), factor, make, suffix)
        Path(f"{name}-n4.log").write_text("\n".join(texts))
    for words in (("old", "new/"), ("old-n4.log", "new-n4.log"), ("old", "new-n4.log")):
        code, out, err = said(capsys, "compare", *words, "--format", "json")
        assert (code, err) == (1, "")
        found = json.loads(out)
        assert [(r["verdict"], r["base_launches"], r["new_launches"]) for r in found["rows"]] == [
            ("SLOWER", 6, 6), ("SAME", 6, 6)]  # fmt: skip
        assert found["rows"][0]["change"] == pytest.approx(0.1, abs=0.005)


def test_sections_of_different_tests_are_one_launch(tmp_path: Path) -> None:
    """A script that runs each test twice, all into one file: two launches of each."""
    gather = row(middle="float    none      -1", count=MIB // 16)
    texts = [nccl(row(), name="all_reduce_perf"), nccl(gather, name="all_gather_perf")] * 2
    run = read(tmp_path, "".join(texts))
    assert [launch.index for launch in run.launches] == [0, 1]
    assert [(r.case.operation, r.launch) for r in run.results if r.case.in_place] == [
        ("all_reduce", 0), ("all_gather", 0), ("all_reduce", 1), ("all_gather", 1)]  # fmt: skip


def test_cycles_of_one_start_are_no_launches(tmp_path: Path) -> None:
    """-N 2: the same sizes again in the same processes; their mean is one figure."""
    run = read(tmp_path, nccl(row(out=40), row(out=44)))
    assert seconds(run) == pytest.approx([42e-6, 41e-6])
    assert [each.launch for each in run.results] == [0, 0]


def test_another_tools_log_is_not_comparable_with_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """INCOMPARABLE with what differs in words, and never a ratio."""
    monkeypatch.chdir(tmp_path)
    case = a_case(backend="nccl", device="cuda", nbytes=MIB, count=MIB // 4, clock="device",
                  world_size=4, ranks_per_host=(4,), issue="pipelined", depth=20, start="none",
                  in_place=True)  # fmt: skip
    store.create(tmp_path / "results" / "mine", a_run(a_result(case)), "x")
    (tmp_path / "theirs.log").write_text(nccl(row()))
    code, out, _ = said(capsys, "compare", "mine", "theirs.log", "--format", "json")
    found = json.loads(out)["rows"]
    assert code == 3
    assert {each["verdict"] for each in found} <= {"INCOMPARABLE", "ONLY NEW"}
    (why,) = (each["why"] for each in found if each["verdict"] == "INCOMPARABLE")
    for name in ("provider native → nccl-tests", "clock device → host", "statistic median → mean",
                 "rank_reduction max → mean", "time_definition exit-entry → loop"):  # fmt: skip
        assert name in why
    assert all(each["change"] is None for each in found)


def test_a_wrong_result_in_a_log_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """#wrong above 0: INVALID, exit code 3, and show says WRONG."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.log").write_text(nccl(row(wrong="7")))
    (tmp_path / "good.log").write_text(nccl(row()))
    code, out, _ = said(capsys, "compare", "good.log", "bad.log")
    assert code == 3
    assert out.count("NEW: launch 0: a rank got a wrong result") == 2
    code, out, _ = said(capsys, "show", "bad.log")
    assert code == 0
    case = "all_reduce on nccl, 1048576 bytes of float32, in place"
    assert f"ERROR (wrong-result): {case}: the log reports 7" in out
    assert out.count("WRONG") >= 2


def test_a_log_is_shown_with_what_it_says_of_itself(tmp_path: Path) -> None:
    """Without torch: the tool, the machine, the definition, what was assumed; CSV and JSON too."""
    path = tmp_path / "a.log"
    path.write_text(nccl(row()))
    shown = run_without_torch(RUN_DDPBENCH, "show", str(path))
    assert f"nccl-tests 2.19.6   {redact.text(str(path))}" in shown
    assert "where     4 ranks: 4 on node1; NVIDIA H100" in shown
    assert "mean over calls, mean over ranks, of loop of calls with one wait at its end" in shown
    assert (
        "NOTE (another-tool): nccl-tests prints no -a: its default, the mean over ranks, is assumed"
        in shown
    )
    run = sources.read(path)
    assert codec.decode(Run, json.loads(formats.json(run))) == run
    assert "nan" not in formats.csv(run)


def test_a_run_is_preferred_to_the_logs_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of runs is its runs, whatever text lies there; a file is named by its path."""
    monkeypatch.chdir(tmp_path)
    store.create(tmp_path / "pool" / "one", a_run(a_result()), "x")
    (tmp_path / "pool" / "notes.txt").write_text("measured on Monday")
    assert sources.find_all("pool") == [Path("pool/one")]
    assert sources.find("pool/one/run.json") == Path("pool/one")
    assert sources.find("pool/notes.txt") == Path("pool/notes.txt")
    with pytest.raises(
        InvalidRun, match=r"no run 'nowhere': give a folder with a run\.json, a log"
    ):
        sources.find_all("nowhere")


# --- out: Prometheus and pyperf -------------------------------------------------------------------

SAMPLE = re.compile(r"(?P<name>[a-z_]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\[\\"n])*)"(?:,|$)')


def exposed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Metric → its samples, as the format's description reads it: each metric's lines together,
    below its HELP and TYPE, no series twice."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    rows = text.splitlines()
    assert text.endswith("\n")
    for i, line in enumerate(rows):
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in found
            assert rows[i + 1] == f"# TYPE {name} gauge"
            found[name] = []
        elif not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match is not None
            assert match["name"] == name
            labels = dict(LABEL.findall(match["labels"] or ""))
            assert LABEL.sub("", match["labels"] or "") == ""
            assert labels not in [each for each, _ in found[name]]
            found[name].append((labels, float(match["value"])))
    return found


def wrong(result: Result) -> Result:
    """The same, with a wrong element."""
    return replace(result, wrong=(Wrong(1, 0, 0, "1", "2"),))


def test_prometheus_has_seconds_and_bytes_a_second_by_identity() -> None:
    """Base units; the labels are the identity; a bad row is marked; the run is a label of one
    metric only."""
    other = a_case(backend="mpi", nbytes=8, count=2)
    run = a_run(a_result(bus_factor=1.5), wrong(a_result(other)))
    found = exposed(formats.FORMATS["prometheus"](run, None, False))
    (others, _), (labels, value) = found["ddpbench_collective_seconds"]
    assert value == 1e-3
    assert labels["backend"] == "gloo"
    assert (labels["nbytes"], labels["in_place"], labels["root"]) == ("4096", "true", "")
    assert others["backend"] == "mpi"
    assert found["ddpbench_collective_bus_bytes_per_second"][1] == (labels, 4096e3 * 1.5)
    assert [v for _, v in found["ddpbench_collective_bad"]] == [1, 0]
    assert found["ddpbench_run_info"][0][0]["run"] == "a-run"
    assert found["ddpbench_run_start_time_seconds"] == [({}, 1767225600.0)]
    assert "run" not in labels


def test_prometheus_has_the_ddp_step() -> None:
    """Step, exposed communication and whether the replicas were equal."""
    bad = some_replicas(equal=False, ok=False)
    run = a_step_run(a_step_result(), a_step_result(a_step_case(backend="mpi"), 1, replicas=bad))
    found = exposed(formats.FORMATS["prometheus"](run, None, False))
    values = {name: [value for _, value in samples] for name, samples in found.items()}
    assert values["ddpbench_step_replicas_equal"] == [1, 0]
    assert values["ddpbench_step_bad"] == [0, 1]
    assert values["ddpbench_step_seconds"][0] == pytest.approx(0.08, rel=0.2)
    low, mid, high = (
        values[f"ddpbench_step_exposed_communication_{each}seconds"][0]
        for each in ("low_", "", "high_")
    )
    assert low <= mid <= high
    assert found["ddpbench_step_seconds"][0][0]["settings"] == "width=1024+depth=8"


def test_labels_are_escaped() -> None:
    """Quote, backslash and line break in a name are read back as they were."""
    name = 'a"b\\c\nd'
    text = prometheus.exposition(a_run(id=name))
    (labels, _), *_ = exposed(text)["ddpbench_run_info"]
    assert labels["run"].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\") == name


def test_pyperf_gets_a_value_a_launch() -> None:
    """A benchmark a case, a run a launch with its median and its first call as warm-up; names are
    unique; what must not be used is left out and named."""
    results = [a_result(None, n, a_summary(1e-3 * (n + 1))) for n in range(3)]
    started = [Launch(n, "gloo", "native", "x", "torchrun", 2, started="2026-01-01T00:00:00Z")
               for n in range(3)]  # fmt: skip
    later = a_result(a_case(async_op=True), 0)
    run = a_run(
        *results, later, wrong(a_result(a_case(nbytes=8, count=2))), launches=tuple(started)
    )
    suite = json.loads(formats.FORMATS["pyperf"](run, None, False))
    first, second = suite["benchmarks"]
    assert suite["version"] == "1.0"
    assert [each["values"] for each in first["runs"]] == [[1e-3], [2e-3], [3e-3]]
    assert first["runs"][0]["warmups"] == [[1, 0.01]]
    assert first["runs"][0]["metadata"]["date"] == "2026-01-01T00:00:00+00:00"
    assert first["metadata"]["unit"] == "second"
    assert first["metadata"]["ddpbench_nbytes"] == 4096
    names = [each["metadata"]["name"] for each in (first, second)]
    assert names[0] == "all_reduce 4 KiB float32 sum in place gloo 2 ranks"
    assert names[1] == f"{names[0]} #2"
    assert "8 B" in suite["metadata"]["ddpbench_left_out"]
    for metadata in (suite["metadata"], first["metadata"]):
        assert all(type(value) in (str, int, float) and value != "" for value in metadata.values())


def test_pyperf_gets_the_ddp_step() -> None:
    """The step of each launch, without those whose replicas differ."""
    bad = a_step_result(
        a_step_case(backend="mpi"), 1, replicas=some_replicas(equal=False, ok=False)
    )
    suite = json.loads(formats.FORMATS["pyperf"](a_step_run(a_step_result(), bad), None, False))
    (only,) = suite["benchmarks"]
    assert only["metadata"]["ddpbench_backend"] == "gloo"
    assert only["runs"][0]["values"][0] == pytest.approx(0.08, rel=0.2)


@pytest.mark.parametrize("form", formats.WITHOUT_COLUMNS)
def test_formats_without_columns_refuse_them_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """One sentence with exit code 2; no rank is started, no folder made."""
    monkeypatch.chdir(tmp_path)
    for words in (("collectives", "--device", "cpu"), ("show", "last")):
        code, out, err = said(capsys, *words, "--format", form, "--columns", "size")
        assert (code, out) == (2, "")
        assert err == f"ddpbench: --format {form} has no columns: leave out --columns\n"
    assert not list(tmp_path.iterdir())
