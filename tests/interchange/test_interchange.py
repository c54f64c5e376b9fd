"""Logs of other tools: what each states, and the sentence on a log that cannot be read."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from frozen import Frozen, finding_facts
from in_process import call_in_process
from without_torch import RUN_DDPBENCH, run_without_torch

from ddpbench.interchange import sources
from ddpbench.interchange.log import Hints
from ddpbench.present import formats
from ddpbench.records import codec
from ddpbench.records.schema import Run
from ddpbench.records.store import InvalidRun

MIB = 2**20
SIDE = ["time", "algbw", "busbw", "#wrong"]
NCCL_HEADS = ["size", "count", "type", "redop", "root", *SIDE, *SIDE]
SETUP = (
    "nThread 1 nGpus 4 minBytes 8 maxBytes 4194304 step: 4(factor) warmup iters: 1 iters: 20 "
    "agg iters: 1 validation: 1 graph: 0 unalign: 0"
)


def nccl(
    *rows: str, heads: list[str] = NCCL_HEADS, name: str = "all_reduce_perf", ranks: int = 4,
    setup: str = SETUP, bounds: str = "0 OK", places: str = "out-of-place      in-place  ",
) -> str:  # fmt: skip
    """Return what nccl-tests prints; name "": a release that prints no name and no version."""
    named = f"""\
# nccl-tests version 2.19.6 nccl-headers=22808 nccl-library=22808
# Collective test starting: {name}
"""
    devices = "".join(
        f"#  Rank {rank:2} Group  0 Pid   4711 on      node1 device {rank:2} [0000:{rank:02x}:00]"
        " NVIDIA H100\n" for rank in range(ranks)
    )  # fmt: skip
    table = "\n".join(rows)
    return f"""{named if name else ""}\
# {setup}
#
# Using devices
{devices}#
#                                  {places}
# {"  ".join(heads)}
#  (B)  (elements)    (us)  (GB/s)  (GB/s)      (us)  (GB/s)  (GB/s)
{table}
# Out of bounds values : {bounds}
# Avg bus bandwidth    : 21.5
#
"""


def row(
    nbytes: int = MIB, out: float = 40.0, inside: float | None = 41.0, wrong: str = "0",
    middle: str = "float     sum      -1", count: int | None = None, more: str = "",
) -> str:  # fmt: skip
    """Return a row of nccl-tests. more: further cells of each side."""
    rates = [(t, nbytes / t / 1e3) for t in (out, inside) if t]
    sides = [f"  {t:7.2f}  {r:6.2f}  {r * 1.5:6.2f}  {wrong:>6}{more}" for t, r in rates]
    return f"{nbytes:12}  {count or nbytes // 4:12}  {middle}{''.join(sides)}"


def the_json(**other: Any) -> str:
    """Return what nccl-tests writes with -J, of the rows above."""
    devices = [{"group": group, "device_info": "NVIDIA H100"} for group in (0, 1)]
    sides = [{"time": time, "alg_bw": 1.0, "bus_bw": 1.5, "nwrong": 0.0} for time in (40.0, 41.0)]
    known: dict[str, Any] = {
        "version": 3, "args": ["./build/all_reduce_perf", "-b", "8", "-g", "4", "-J", "x.json"],
        "nccl_version": 22808,
        "config": {"nthreads": 1, "ngpus": 4, "iterations": 20, "aggregated_iterations": 1,
                   "graph": 0, "blocking_collectives": "false", "devices": devices},
        "results": [{"size": MIB, "count": MIB // 4, "type": "float", "redop": "sum",
                     "root": "    -1", "out_of_place": sides[0], "in_place": sides[1]}],
    }  # fmt: skip
    return json.dumps({**known, **other})


def osu(title: str, *rows: str, heads: str = "Size       Avg Latency(us)", dtype: str = "") -> str:
    """Return what a benchmark of OSU prints."""
    typed = f"# Datatype: {dtype}.\n" if dtype else ""
    rest = "".join(f"{line}\n" for line in rows)
    return f"\n# OSU MPI {title} Latency Test v7.4\n{typed}# {heads}\n{rest}"


NONE = "float    none      -1"
FULL = "Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations"
ALLREDUCE = osu("Allreduce", "4     2.00", "8     2.50")
GROUPS = re.sub(r"Rank ( [4-7]) Group  0", r"Rank \1 Group  1", nccl(row(), ranks=8))
EMPTY = "0    0  float  sum  -1  34.27    0.00    0.00    N/A   33.57    0.00    0.00  N/A"
ITERATIONS = [*NCCL_HEADS[:5], *2 * [*SIDE, "i_min", "i_max", "i_p99", "i_cv%"]]
ONE_SIDE = [*NCCL_HEADS[:9], "algo", "proto", "channels"]
OF_ONE_SIDE = row(inside=None) + "  RING  LL  4"

# What a log holds → the log, and, if they are stated, --op and --ranks
LOGS: dict[str, tuple[Any, ...]] = {
    "nccl-tests": (nccl(row(8, 9.5, 9.75), row(), row(64 * MIB, 700.5, 701), EMPTY),),
    "no name": (nccl(row(), name=""), "all_reduce"),
    "no devices": (nccl(row(), ranks=0), None, 4),
    "what is printed wins": (nccl(row()), "broadcast", 2),
    "all_gather": (nccl(row(middle=NONE, count=MIB // 16), name="all_gather_perf"),),
    "root": (nccl(row(middle="half    none       2"), name="/x/broadcast_perf_mpi"),),
    "sendrecv": (nccl(row(middle=NONE), name="sendrecv_perf"),),
    "-m 3": (nccl(row(), setup=SETUP.replace("agg iters: 1", "agg iters: 3")),),
    "-I": (nccl(row(more="  1.0  9.0  8.0  4.5"), heads=ITERATIONS),),
    "#wrong": (nccl(row(wrong="3"), row(4 * MIB, 80, 81), bounds="2 FAILED"),),
    "no check": (nccl(row(wrong="N/A")),),
    "groups": (GROUPS,),
    "two tests twice": (2 * (nccl(row()) + nccl(row(middle=NONE), name="broadcast_perf")),),
    "-J": (the_json(),),
    "rccl-tests": (nccl(row(), name="").replace("NVIDIA", "AMD"), "all_reduce"),
    "rccl-tests -O 0": (nccl(OF_ONE_SIDE, heads=ONE_SIDE, places="in-place"),),
    "OSU": (ALLREDUCE, None, 4),
    "OSU -f": (osu("Allgather", "1024     15.50    14.00    17.00   1000", heads=FULL), None, 4),
    "OSU -c": (osu("All-to-All Personalized Exchange", "1024     15.50     Pass", "8  3.00  Fail",
                   heads="Size       Avg Latency(us)          Validation"), None, 4),
    "OSU scatter": (osu("Scatter", "1024     15.50", dtype="MPI_CHAR"), None, 4),
    "OSU barrier": (osu("Barrier", "            15.50", heads="Avg Latency(us)"), None, 4),
    "OSU, several": (ALLREDUCE + osu("Broadcast", "4  1.50") + ALLREDUCE, None, 4),
}  # fmt: skip
COMMON = {"form": "tensor", "async_op": False, "size_convention": "total", "clock": "host",
          "rank_reduction": "mean", "statistic": "mean", "group": "world", "groups": 1,
          "ranks_per_host": ()}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


def read(text: str, operation: str | None = None, ranks: int | None = None) -> Run:
    """Return the run in a log of this text, with the facts that the user states."""
    Path("a.log").write_text(text)
    return sources.read(Path("a.log"), Hints(operation, ranks))


@pytest.mark.parametrize("name", LOGS)
def test_a_log_states_these_cases_and_figures(frozen: Frozen, name: str) -> None:
    """Each case has the tool's own identity, and the time is that of the tool."""
    run = read(*LOGS[name])
    facts: list[Any] = [run.launches[0].facts["tool"]]
    for result in run.results:
        case, summary = asdict(result.case), result.summary
        assert summary is not None
        assert {key: case.pop(key) for key in COMMON} == COMMON
        facts.append({
            "case": list(case.values()), "launch": result.launch, "seconds": summary.median_seconds,
            "fastest": summary.rank_min_seconds, "calls": summary.repetitions,
            "checks": result.checks, "wrong": [wrong.got for wrong in result.wrong],
        })  # fmt: skip
    frozen.facts([*facts, *map(finding_facts, run.findings)])


PREFIXES: dict[str, Callable[[str], str]] = {
    "srun --label": lambda line: f" 0: {line}",
    "mpirun --tag-output": lambda line: f"[1,0]<stdout>:{line}",
    "prterun": lambda line: f"[prterun-node1-4711@1,0]<stdout>: {line}",
    "kubectl --prefix": lambda line: f"[pod/nccl-launcher-x7k2/mpi] {line}",
    "kubectl --timestamps": lambda line: f"2026-07-09T16:03:00.123456789Z {line}",
    "pod": lambda line: f"nccl-launcher-x7k2 {line}",
    "two": lambda line: f"nccl-0 [1,0]<stdout>: {line}",
    "colours": lambda line: f"\x1b[1m\x1b[32m{line}\x1b[0m",
    "crlf": lambda line: f"{line}\r",
}


@pytest.mark.parametrize("kind", ["nccl-tests", "-J", "OSU"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_are_removed(kind: str, prefix: str) -> None:
    """What launchers and terminals add moves no figure, nor do lines of other programs."""
    text, *hints = LOGS[kind]
    clean = read(text, *hints).results
    lines = ["Run on Monday:", *text.split("\n"), "All processes have ended.", "That is slow."]
    prefixed = "\n".join(map(PREFIXES[prefix], lines))
    run = read(prefixed, *hints)
    assert (run.results, run.findings) == (clean, ())


@pytest.mark.parametrize("kind", ["nccl-tests", "-J", "OSU"])
def test_no_cut_makes_another_figure(kind: str) -> None:
    """A log that ends anywhere is refused with a sentence, or its whole rows are what they were."""
    text, *hints = LOGS[kind]
    whole = read(text, *hints).results
    for end in [*range(0, len(text) - 60, 9), *range(len(text) - 60, len(text) - 3)]:
        try:
            run = read(text[:end], *hints)
        except InvalidRun:
            continue
        assert run.results == whole[: len(run.results)]
        if kind == "nccl-tests" and "# Avg bus bandwidth" not in text[:end]:
            assert [finding.code for finding in run.findings] == ["left-out"]


def test_what_is_not_read_is_one_finding(frozen: Frozen) -> None:
    """It counts tests and rows, and names the first line; `compare` shows it too."""
    damaged, other_rate = row(8).replace(" -1", " -1 x"), row(4 * MIB).replace("40.00", "46.00")
    run = read(
        nccl(row(), name="hypercube_perf") + nccl(row()) + nccl(name="broadcast_perf")
        + nccl(row(), damaged, other_rate, name="reduce_perf")
    )  # fmt: skip
    assert [r.case.operation for r in run.results] == 2 * ["all_reduce"] + 2 * ["reduce"]
    frozen.findings(run.findings)
    Path("old.txt").write_text(ALLREDUCE)
    Path("new.txt").write_text(osu("Non-blocking Allreduce", "4  2.00") + 2 * ALLREDUCE)
    code, out, _ = call_in_process(["compare", "old.txt", "new.txt", "--ranks", "4"])
    assert code == 0
    frozen.text(next(line for line in out.split("\n") if "left out" in line))


NOT_READ: dict[str, str] = {
    "empty": "\n \n",
    "two tools": nccl(row()) + ALLREDUCE,
    "no operation": nccl(row(), name=""),
    "no ranks": nccl(row(), ranks=3).replace("Rank  0", "Rank  9"),
    "no ranks of OSU": ALLREDUCE,
    "several at once": nccl(row()).replace("Rank  1", "Rank  0"),
    "before 2.13": nccl(row(), setup="nThread: 1 nGpus: 4 warmupIters: 5 iters: 10"),
    "no row": nccl(),
    "-N": nccl(row(), row()),
    "-z": nccl(row(), f"{SETUP}\n# Blocking Enabled: wait for completion"),
    "-G": nccl(row(), setup=SETUP.replace("graph: 0", "graph: 7")),
    "-C": nccl(row(), heads=[head.replace("time", "cputime") for head in NCCL_HEADS]),
    "bandwidth of another time": nccl(row().replace("40.00", "47.00")),
    "cut JSON": the_json()[:-40],
    "-a in JSON": the_json(args=["all_reduce_perf", "-a", "0"]),
    "OSU, a cut row": osu("Allreduce", "8  2.50")[:-2],
    "OSU, non-blocking": osu("Non-blocking Allreduce", "4  2.00"),
    "OSU, point to point": ALLREDUCE.replace("Allreduce ", ""),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_a_log_that_cannot_be_read_is_one_sentence(frozen: Frozen, name: str) -> None:
    """It names the file and the line, in show and in compare; the exit code is 3."""
    Path("bad.log").write_bytes(NOT_READ[name].encode("latin-1", errors="replace"))
    Path("good.log").write_text(nccl(row()))
    ranks = [] if name.startswith("no ranks") else ["--ranks", "4"]
    for words in (["show", "bad.log"], ["compare", "good.log", "bad.log"]):
        code, out, err = call_in_process([*words, *ranks])
        assert (code, out) == (3, "")
        assert re.fullmatch(r"ddpbench: bad\.log [^\n]+\n", err)
    frozen.text(err)


def test_folders_of_logs_are_compared() -> None:
    """Each log is a launch; six of one test in one file are too."""
    for name, factor in (("old", 1.0), ("new", 1.2)):
        draw = random.Random(factor)
        times = [400 * factor * draw.uniform(0.998, 1.002) for _ in range(6)]
        texts = [nccl(row(out=time, inside=410)) for time in times]
        Path(name).mkdir()
        for i, text in enumerate(texts):
            (Path(name) / f"{i}.log").write_text(text)
        Path(f"{name}.log").write_text("\n".join(texts))
    for words in (("old", "new/"), ("old.log", "new.log"), ("old", "new.log")):
        code, out, err = call_in_process(["compare", *words, "--format", "json"])
        rows = json.loads(out)["rows"]
        assert (code, err) == (1, "")
        assert [(r["verdict"], r["base_launches"], r["new_launches"]) for r in rows] == [
            ("SLOWER", 6, 6), ("SAME", 6, 6)]  # fmt: skip
        assert rows[0]["change"] == pytest.approx(0.2, abs=0.005)


def test_a_log_is_shown(frozen: Frozen) -> None:
    """Without torch: the tool, the ranks, the definition; CSV and JSON too."""
    run = read(nccl(row()))
    shown = run_without_torch(RUN_DDPBENCH, "show", str(Path("a.log").resolve()))
    frozen.text("\n".join(shown.split("\n")[1:]))  # the first line shows the path
    assert codec.decode(Run, json.loads(formats.show("json", run))) == run
    assert "nan" not in formats.show("csv", run)
