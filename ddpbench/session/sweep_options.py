"""The options of `ddpbench collectives`, validated. No torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ddpbench.catalog import sizes
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.catalog.sizes import SYNTAX
from ddpbench.launch.placement import Refused
from ddpbench.measure.start import STARTS
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.records.schema import Plan
from ddpbench.runtime import devices
from ddpbench.runtime.subgroups import GROUPS
from ddpbench.session import options
from ddpbench.session.run_options import RunOptions

# Seconds per case, for a single launch and for each of several. Launches differ more from each
# other than repetitions within one launch do, so each of several needs little time.
SLICE, SHORT_SLICE = 2.0, 0.1
TURN_SLICE = 1.0  # in `ab`: on gloo, a shorter launch is as imprecise as launches differ
DEFAULT_SIZES = {"cpu": "4:64M:x4", "cuda": "8:1G:x4"}
GLOO_SIZES = {**DEFAULT_SIZES, "cuda": "8:64M:x4"}  # it moves CUDA tensors at about 1 GB/s
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
        for option in ("form", "place", "dtype", "reduce-op"):
            chosen = getattr(self, option.replace("-", "_"))
            if chosen and not any({*chosen} & {*_supported(option, name)} for name in self.op):
                values = _supported(option, self.op[0])
                advice = f"use --{option} {values[0]}, or " if values else ""
                raise Refused(
                    f"--{option} {','.join(chosen)} applies to none of {', '.join(self.op)}: "
                    f"{advice}leave it out"
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


def default_sizes(backend: str, device: str) -> tuple[int, ...]:
    """Return the sizes of a sweep without --sizes."""
    table = GLOO_SIZES if backend == "gloo" else DEFAULT_SIZES
    return sizes.parse(table[devices.get(device).defaults])


def _supported(option: str, operation: str) -> tuple[str, ...]:
    entry = OPERATIONS[operation]
    if option == "dtype":
        return tuple(DTYPES) if entry.sized else ()
    if option == "reduce-op":
        return REDUCE_OPS if entry.reduces else ()
    return entry.forms if option == "form" else entry.places


MEASURED = """
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
"""
PROTOCOL = """
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
    texts = MEASURED.format(
        operations=", ".join(OPERATIONS),
        dtypes=", ".join(DTYPES),
        reduce_ops=", ".join(REDUCE_OPS),
        syntax=SYNTAX,
        **DEFAULT_SIZES,
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
    options.add_where(parser)
    _add_protocol(parser)
    options.add_repeats(parser, "the order of cases", Options.usual_launches)
    options.add_shown(parser, COLUMNS)
    options.add_stored(parser)


def _add_protocol(parser: argparse.ArgumentParser) -> None:
    texts = PROTOCOL.format(short=SHORT_SLICE, slice=SLICE)
    add = options.add_group(parser, "how it is measured", texts)
    add("--mode", default="isolated", choices=("isolated", "pipelined"))
    add("--in-flight", kind=options.whole(2), default=20, metavar="N")
    add("--sync", default="barrier", choices=tuple(STARTS))
    add("--precision", kind=options.positive, default=2.5, metavar="PERCENT")
    add("--case-time", kind=options.positive, metavar="SECONDS")
    add("--no-check", action="store_true")
    add("--peak-bandwidth", kind=options.positive, metavar="GB/S")
