"""Describe a test of nccl-tests or rccl-tests: the identity of its figures.

It times a loop of its iterations and synchronises once at the end: `pipelined`, the mean over the
iterations, by default the mean of that over processes too (-a). Sizes are the total buffer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.catalog.operations import OPERATIONS
from ddpbench.interchange.log import Row, Section
from ddpbench.records.schema import Case

# The program, less `_perf`, → the operation. sendrecv passes a buffer round in a ring, which is no
# operation of ddpbench: it keeps its own name.
PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "sendrecv": "sendrecv",
}
DTYPES = {
    "char": "int8",
    "int": "int32",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
# -a → over processes
AVERAGES = {0: "rank 0", 1: "mean", 2: "min", 3: "max"}
# -z → issue, start, and what is timed
ISSUES = {
    0: ("pipelined", "none", "loop of calls with one wait at its end / calls"),
    1: ("isolated", "barrier", "loop of calls, each with a wait and a barrier / calls"),
    2: ("isolated", "none", "loop of calls, each with a wait / calls"),
    3: ("isolated", "barrier", "calls with a wait each, less the barriers between / calls"),
}


@dataclass(frozen=True)
class Setup:
    """How a test was called, and its ranks."""

    program: str
    tool: str  # "nccl-tests" or "rccl-tests"
    version: str | None
    library: str | None  # its version
    iterations: int  # 0: not told
    aggregated: int
    graph: int  # launches of a CUDA graph; 0: none
    blocking: int
    average: int
    unalign: int
    world_size: int
    ranks: tuple[dict[str, Any], ...]
    cpu_time: bool = False

    def case(
        self, dtype: str, reduce_op: str | None, *, root: int, nbytes: int, count: int, place: str
    ) -> Case:
        """Build the identity of one figure.

        root: -1 if there is none. place: "in" or "out". Raises ValueError for an impossible size.
        """
        if not 0 < nbytes < 2**63:
            raise ValueError("has a size that is not from 1 to 2**63 bytes")
        issue, start, timed = ISSUES[self.blocking]
        timed += f", in {self.graph} launches of a CUDA graph" if self.graph else ""
        hosts = Counter(str(rank.get("hostname")) for rank in self.ranks)
        return Case(
            operation=PROGRAMS[self.program],
            form="tensor",
            backend="nccl",
            provider=self.tool,
            device="cuda",
            dtype=DTYPES.get(dtype, dtype),
            reduce_op=None if reduce_op in (None, "", "none") else reduce_op,
            root=None if root < 0 else root,
            nbytes=nbytes,
            count=count,
            in_place=place == "in",
            async_op=False,
            issue=issue,
            start=start,
            depth=self.aggregated * (self.iterations if issue == "pipelined" else 1),
            world_size=self.world_size,
            ranks_per_host=tuple(hosts.values()),
            buffers=self.tool + (f", {self.unalign} elements off" if self.unalign else ""),
            time_definition=timed + (", until the last is issued" if self.cpu_time else ""),
            rank_reduction=AVERAGES[self.average],
            statistic="mean",
        )

    def section(self, rows: Sequence[Row], **other: Any) -> Section:
        """Build the section of this call of the test. Raises ValueError without rows or ranks."""
        if self.world_size < 1:
            raise ValueError(f"is of {self.world_size} ranks")
        if not rows:
            raise ValueError(f"{self.program}_perf printed no row of results")
        name = self.tool.removesuffix("-tests").upper()
        facts = {"tool": f"{self.tool} {self.version or 'of unknown version'}"}
        if self.library:
            facts["nccl"] = self.library
        return Section(
            f"{name} {self.library or 'of unknown version'}",
            tuple(rows),
            self.ranks,
            facts,
            **other,
        )


def build_row(setup: Setup, case: Case, seconds: float, checked: bool, wrong: float | None) -> Row:
    """Build a row of a test. Raises ValueError for an impossible time."""
    if not 0 <= seconds < math.inf:
        raise ValueError(f"a time of {seconds} s")
    complaint = f"{wrong:g} wrong elements" if wrong else None
    calls = setup.iterations * setup.aggregated * max(setup.graph, 1)
    return Row(case, seconds, calls, checked=checked, wrong=complaint)


def bus_factor(name: str, ranks: int) -> float:
    """Return busbw / algbw of a test on this many ranks."""
    operation = OPERATIONS.get(PROGRAMS[name])
    return operation.bus_factor(ranks) if operation else 1.0


def parse_program(name: str) -> str:
    """Return a test's name without its folder and `_perf`. Raises ValueError if it is unknown."""
    short = name.rpartition("/")[2].partition("_perf")[0]
    if short not in PROGRAMS:
        known = ", ".join(f"{name}_perf" for name in PROGRAMS)
        raise ValueError(f"is of {short}_perf, which ddpbench does not read (it reads {known})")
    return short


def format_version(code: int) -> str:
    """Format a version code of NCCL: 22808 → "2.28.8"; before NCCL 2.9, 2808 → "2.8.8"."""
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
