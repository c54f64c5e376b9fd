"""The options of `ddpbench collectives`, validated. No torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ddpbench.catalog import sizes
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.launch.placement import Refused
from ddpbench.measure.start import STARTS
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.records.schema import Plan
from ddpbench.records.wording import list_choices
from ddpbench.runtime.subgroups import GROUPS
from ddpbench.session import options
from ddpbench.session.options import RunOptions

# Seconds per case, for a single launch and for each of several. Launches differ more from each
# other than repetitions within one launch do, so each of several needs little time.
SLICE, SHORT_SLICE = 2.0, 0.1
TURN_SLICE = 1.0  # in `ab`: on gloo, a shorter launch is as imprecise as launches differ
FORMS, PLACES = ("tensor", "list"), ("in", "out")


@dataclass(frozen=True)
class Options(RunOptions):
    """The options of a sweep.

    An empty `dtype`, `reduce_op`, `form` or `place` means the usual one of each operation.
    """

    command = "collectives"
    usual_launches = 6

    op: tuple[str, ...]
    sizes: tuple[int, ...] | None
    dtype: tuple[str, ...]
    reduce_op: tuple[str, ...]
    form: tuple[str, ...]
    place: tuple[str, ...]
    groups: tuple[str, ...]
    async_op: bool
    mode: str
    in_flight: int
    sync: str
    precision: float
    case_time: float | None
    no_check: bool
    peak_bandwidth: float | None

    @property
    def subjects(self) -> tuple[str, ...]:
        return self.op

    def check(self) -> None:
        operations = [OPERATIONS[name] for name in self.op]
        supported = {
            "form": {form for each in operations for form in each.forms},
            "place": {place for each in operations for place in each.places},
            "dtype": set(DTYPES) if any(each.sized for each in operations) else set(),
            "reduce-op": set(REDUCE_OPS) if any(each.reduces for each in operations) else set(),
        }
        for option, known in supported.items():
            chosen = getattr(self, option.replace("-", "_"))
            if chosen and not known.intersection(chosen):
                choice = f"choose {list_choices(sorted(known))}, or " if known else ""
                raise Refused(
                    f"--{option} {','.join(chosen)} applies to none of {', '.join(self.op)}: "
                    f"{choice}leave it out"
                )

    def plan(self, seed: int) -> Plan:
        several = TURN_SLICE if self.paced else SHORT_SLICE
        usual = SLICE if self.launches == 1 else several
        return Plan(
            issue=self.mode,
            start="none" if self.mode == "pipelined" else self.sync,
            depth=self.in_flight,
            precision=self.precision / 100,
            slice_seconds=self.case_time or usual,
            check=not self.no_check,
            timeout_seconds=self.timeout,
            seed=seed,
        )


OPTIONS = """
--op           operations to measure: {operations}, or all
--sizes        total bytes as nccl-tests counts them: {syntax} (default: {cpu}; {cuda} for CUDA
               tensors, on gloo up to 64M)
--dtype        dtypes to measure: {dtypes}, or all
               (default: float32)
--reduce-op    reduce ops to measure: {reduce_ops}, or all (default: sum)
--form         call with one tensor (tensor) or with a list of tensors (list), if the operation has
               both (default: tensor, if the operation has it)
--place        write the result over the input (in) or elsewhere (out), if the operation has both
               (default: each operation's usual one)
--groups       ranks that work together: all ranks (world), the ranks of each host (host) or one
               rank of each host (cross); all hosts, or all such groups, work at the same time
--async        call with async_op=True and wait for the result
--mode         make one call at a time, started on all ranks together (isolated), or keep several
               calls in flight as nccl-tests does (pipelined)
--in-flight    calls in flight with --mode pipelined
--sync         how the ranks start a call together: the backend's barrier, p2p_barrier (the same
               messages on every backend) or none
--precision    end a case when the 95 %% interval of its median is within ± this percentage
--case-time    longest time for one case in one launch, in seconds (default: {short:g}; {slice:g}
               with --launches 1)
--no-check     do not compare results with the expected ones
--peak-bandwidth  highest one-way rate of a rank, of which the table shows each result as a
               percentage (default: measured for CPU tensors; for nccl, the rate that NVLink, PCIe
               or RDMA ports report)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; imports no torch."""
    texts = OPTIONS.format(
        operations=", ".join(OPERATIONS),
        dtypes=", ".join(DTYPES),
        reduce_ops=", ".join(REDUCE_OPS),
        syntax=sizes.SYNTAX,
        short=SHORT_SLICE,
        slice=SLICE,
        **sizes.DEFAULTS,
    )
    add = options.add_group(parser, "what is measured", texts)
    three = ("all_reduce", "all_gather", "broadcast")
    add("--op", kind=options.names("operation", OPERATIONS), default=three, metavar="OP,…")
    add("--sizes", kind=options.checked(sizes.parse), metavar="SIZES")
    add("--dtype", kind=options.names("dtype", DTYPES), default=(), metavar="DTYPE,…")
    reduce_ops = options.names("reduce op", REDUCE_OPS)
    add("--reduce-op", kind=reduce_ops, default=(), metavar="OP,…")
    add("--form", kind=options.names("form", FORMS), default=(), metavar="FORM,…")
    add("--place", kind=options.names("place", PLACES), default=(), metavar="PLACE,…")
    add("--groups", kind=options.names("group", GROUPS), default=("world",), metavar="GROUP,…")
    add("--async", dest="async_op", action="store_true")
    add = options.add_group(parser, "how it is measured", texts)
    add("--mode", default="isolated", choices=("isolated", "pipelined"))
    add("--in-flight", kind=options.whole(2), default=20, metavar="N")
    add("--sync", default="barrier", choices=tuple(STARTS))
    add("--precision", kind=options.positive, default=2.5, metavar="PERCENT")
    add("--case-time", kind=options.positive, metavar="SECONDS")
    add("--no-check", action="store_true")
    add("--peak-bandwidth", kind=options.positive, metavar="GB/S")
    options.add_measuring(parser, COLUMNS, "the order of cases", Options.usual_launches)
