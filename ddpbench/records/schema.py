"""The stored record of a run: frozen dataclasses, base units, one version number.

Raw samples are stored beside these records as Parquet; a `Summary` can be derived from them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpbench.records.launched import Launch
from ddpbench.records.table import Table
from ddpbench.records.watched import Watched

SCHEMA = 1
SEVERITIES = ("error", "warning", "note")  # of findings, the worst first
# Time definitions: of the host; between device events; without the kernel launch; with stream waits
EXIT_ENTRY, EVENTS, HIDDEN_LAUNCH = "exit-entry", "events", "hidden-launch"
TWO_STREAMS = "hidden-launch-two-streams"
LAUNCH_HIDDEN = (HIDDEN_LAUNCH, TWO_STREAMS)


@dataclass(frozen=True)
class Case:
    """The identity of one measured thing. Numbers whose cases differ are incomparable."""

    operation: str
    form: str  # "tensor": one tensor per side; "list": a list of tensors, one per rank
    backend: str
    provider: str  # implementation of the backend: "native", "mpi4py", …
    device: str
    dtype: str
    reduce_op: str | None
    root: int | None
    nbytes: int  # S of nccl-tests: the total buffer
    count: int  # elements as nccl-tests prints them: of one rank where S is n blocks
    in_place: bool
    async_op: bool
    issue: str  # "isolated" or "pipelined"
    start: str  # "barrier", "p2p_barrier" or "none"
    depth: int  # operations in flight; 0: unknown
    world_size: int
    ranks_per_host: tuple[int, ...]  # empty: unknown
    buffers: str = "torch"  # whose memory: torch's, or that of another tool
    size_convention: str = "total"
    time_definition: str = EXIT_ENTRY
    clock: str = "host"
    rank_reduction: str = "max"
    statistic: str = "median"
    # Ranks that work together: "host", the ranks of each host; "cross", one of each host; "world",
    # all. The fields above describe one such group.
    group: str = "world"
    groups: int = 1  # that work at once

    @property
    def called(self) -> str:
        """The operation, with its groups unless all ranks are one: "all_reduce (host groups)"."""
        return self.operation + ("" if self.group == "world" else f" ({self.group} groups)")

    @property
    def key(self) -> str:
        """A readable name, unique among the cases of one run."""
        parts = [
            None if self.group == "world" else self.group,
            *(self.operation, self.form, self.backend, self.device, self.dtype, self.reduce_op),
            None if self.root is None else f"root{self.root}",
            str(self.nbytes),
            "in" if self.in_place else "out",
        ]
        return "/".join(part for part in parts if part)


@dataclass(frozen=True)
class Plan:
    """How every case of a run is measured."""

    issue: str = "isolated"
    start: str = "barrier"
    depth: int = 20  # operations in flight when pipelined
    precision: float = 0.025  # relative half-width of the median's interval at which a case ends
    slice_seconds: float = 2.0  # of warm-up and timed repetitions, for one case
    max_repetitions: int = 5000
    check: bool = True
    verify: int = 1  # verify the replicas every N DDP steps; 0: never
    timeout_seconds: float = 60.0  # of one wait
    fail_on: str = "error"  # findings of this severity or worse make the exit code 1
    seed: int = 0


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a median."""

    low: float
    high: float
    confidence: float
    of: str  # the statistic, and the values that it summarises: "median of 6 batch medians", …

    @property
    def half_width(self) -> float:
        """Half the width, relative to the middle."""
        if self.high == self.low:  # both may be 0
            return 0.0
        return (self.high - self.low) / (self.high + self.low)


@dataclass(frozen=True)
class Summary:
    """Statistics of the timed repetitions of one case; seconds of ONE operation.

    `median_seconds` and the percentiles are of t_max, the largest (exit - entry) of a repetition.
    In another tool's log, `statistic` and `rank_reduction` of the case define `median_seconds`, and
    figures that the tool does not print are None.
    """

    repetitions: int  # 0: unknown
    median_seconds: float
    interval: Interval | None
    mean_seconds: float
    min_seconds: float | None
    max_seconds: float | None
    percentiles_seconds: dict[str, float]  # those that enough repetitions support
    rank_mean_seconds: float | None  # median of the mean over ranks
    rank_min_seconds: float | None  # median of the fastest rank
    skew_seconds: float | None  # median of (last entry - first entry); None where clocks differ
    last_in_seconds: float | None  # median of (last exit - last entry)
    global_seconds: float | None  # median of (last exit - first entry)
    outliers: int | None  # beyond 1.5 interquartile ranges; counted, never dropped
    far_outliers: int | None  # beyond 3
    # Quantiles of t_max in steps of 5 %, which show two modes; empty if a repetition is several
    # calls, or in older runs.
    quantiles_seconds: tuple[float, ...] = ()
    # Mean over repetitions and ranks of (exit - entry) by the host's clock: the figure of OSU and
    # of nccl-tests. None: unknown, or stored before this field existed.
    overall_mean_seconds: float | None = None
    # Until the call returns to the host, on the slowest rank: median. None: not measured apart.
    launch_seconds: float | None = None


@dataclass(frozen=True)
class Wrong:
    """One rank's first wrong element."""

    rank: int  # -1: unknown
    repetition: int  # of the timed repetitions; -1: a repetition made for the check alone
    index: int
    expected: str
    got: str


@dataclass(frozen=True)
class Limit:
    """The rate that bounds a case, and where it comes from."""

    bytes_per_second: float
    source: str


@dataclass(frozen=True)
class Result:
    """One case in one launch: measured, or skipped on all ranks together for a reason."""

    case: Case
    launch: int
    bus_factor: float  # busbw / algbw
    least_nbytes: float  # the least that a rank must move, with any algorithm
    requested_nbytes: int
    reason: str | None = None  # why the case was skipped
    calls: int = 1  # operations in one repetition: in flight, batched, or both ways of a ping-pong
    batch: int = 1  # calls per stamp, because a single call is too short for the clock
    cold_seconds: float | None = None  # the first call, never mixed in
    warm_up: int = 0
    stop_reason: str | None = None
    summary: Summary | None = None
    checks: int = 0
    wrong: tuple[Wrong, ...] = ()
    limit: Limit | None = None
    hard_limit: Limit | None = None
    # Share of the cores' time that other processes used; if this case was too short to measure it,
    # over this case and those before.
    others_share: float | None = None
    measuring_seconds: float = 0.0  # in warm-up and timed repetitions
    wall_seconds: float = 0.0  # of the whole case
    # Largest error between stamps of different ranks, converted to rank 0's clock; 0.0: all ranks
    # read one clock; None: unknown. Above 5 % of a repetition, skew is not computed.
    clock_off_seconds: float | None = None
    # Page faults per timed repetition, in the rank with the most; None: unknown.
    page_faults: float | None = None
    # Round trip of a cache line between the cores of two neighbouring ranks, after the case; of the
    # slowest pair. None: unknown.
    handoff_seconds: float | None = None
    # Share of timed repetitions whose kernel launch was not hidden, in the rank with the most.
    unhidden_share: float | None = None


LEFT_OUT = "left-out"  # code of the finding on parts of a log that are missing or not read


@dataclass(frozen=True)
class Finding:
    """A fact with a severity, a code, a place, one sentence and a next step."""

    severity: str  # one of SEVERITIES
    code: str
    sentence: str
    next_step: str = ""
    place: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """The identity of one measured DDP step. Numbers whose cases differ are incomparable.

    For a job that `watch` observed, only the script, its arguments and its ranks are known: the
    fields of the model, its data and its optimizer keep their defaults.
    """

    workload: str  # its name, the user's "package.module:function", or the watched script
    settings: tuple[str, ...]  # "width=1024", …: they define the model and its data
    parameters: int = 0
    parameter_nbytes: int = 0
    backend: str
    provider: str
    device: str
    batch: int = 0  # samples of one rank in one micro-batch
    accumulate: int = 0  # micro-batches of a step
    optimizer: str = ""
    amp: str | None = None  # "bf16"
    bucket_cap_mb: float | None = None  # None: DDP's default, whose first bucket is smaller
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    comm_hook: str = ""  # "none", "fp16", …
    threads: int  # of compute, in one rank
    world_size: int
    ranks_per_host: tuple[int, ...]
    time_definition: str = "zero_grad, forward, backward, optimizer"
    clock: str = "host"
    rank_reduction: str = "max"
    statistic: str = "median"
    parallel: str = "ddp"  # "ddp", "fsdp", "hsdp", "tp" or "fsdp+tp"
    mesh: tuple[int, ...] = ()  # ranks along each dimension; empty: DDP
    prefetch: bool | None = None  # of the next layer's parameters; None: nothing is gathered
    reshard_after_forward: bool | None = None  # None: nothing is sharded by fully_shard

    @property
    def key(self) -> str:
        """A readable name, unique among the cases of one run."""
        return f"{self.workload}/{self.backend}/{self.device}"

    @property
    def data_ranks(self) -> int:
        """The number of ranks that have different batches: those along tp share one."""
        sharing = self.mesh[-1] if self.mesh and self.parallel.endswith("tp") else 1
        return self.world_size // sharing


@dataclass(frozen=True)
class Figure:
    """A median over rounds, in seconds unless another unit is given, and its interval."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Phase:
    """A part of the DDP step as it was timed in every rank."""

    name: str  # "forward", "backward", "optimizer", "step"
    slowest: Figure  # of the slowest rank of each step
    fastest_seconds: float  # median of the fastest rank of each step
    slowest_rank: int  # the rank that was the slowest most often
    slowest_share: float  # share of the steps in which it was; 0: unknown


@dataclass(frozen=True)
class Part:
    """A part of the step, derived from a difference of arms, paired round by round."""

    name: str
    figure: Figure
    share: float | None  # of the step
    resolved: bool  # its interval does not include 0, so it is more than noise
    rank: int | None = None  # the rank that causes it


@dataclass(frozen=True)
class Bucket:
    """One of DDP's buckets, as a timing hook observed it."""

    index: int  # in the order of reduction
    nbytes: int
    parameters: int
    first: str  # name of the first parameter in it
    last: str
    handed_seconds: float  # from the start of backward until the last rank hands it over, median
    wire: Figure  # the least over ranks of (reduced - handed over)
    wait: Figure  # the most over ranks of (reduced - handed over), less the wire
    late_rank: int | None  # the rank for which the others wait; None: none exceeds the noise
    # The same reduction while nothing else runs; None: not measured. The wire is this time, the
    # times in which other buckets are in flight and in which backward computes, as far as they
    # explain the rest, and an unexplained rest, which can be negative.
    alone: Figure | None = None
    queue: Figure | None = None
    contention: Figure | None = None
    unexplained: Figure | None = None


@dataclass(frozen=True)
class Collective:
    """The communication of a layer group by one operation in one phase of a step."""

    layers: str  # "blocks.3", or "root" for all modules in no other group
    phase: str  # "forward", "backward"
    operation: str
    calls: int  # in a step
    nbytes: int  # of these calls together: of the total buffers
    exposed: Figure  # how long the compute waits for it, on the rank that waits least
    hidden: Figure  # how long it is in flight while the compute continues
    wait: Figure  # the most over ranks of the exposed time, less the least
    late_rank: int | None  # the rank for which the others wait; None: none exceeds the noise


@dataclass(frozen=True)
class Replicas:
    """The results of all verifications of one case."""

    verified: int  # steps
    last_step: int  # the number of the last of them; steps count from 1, warm-up first
    equal: bool  # everything that was compared was equal
    ok: bool  # equal, all finite, and everything was compared
    compared: dict[str, int]  # kind → how many tensors and numbers
    nbytes: int  # of them, in one rank
    cost: Figure | None  # of one verification, on the slowest rank
    share: float | None  # cost / step
    differing: int = 0  # verifications in which they were not equal, or not finite
    buffers: int = 0  # that differed in the last one, like buffers that DDP resends
    equal_until: int | None = None  # the last step after which they were found equal
    first_bad: int | None = None  # the first step after which they were not
    tensors: tuple[str, ...] = ()  # "parameter 0.weight": those that differed after that step
    ranks: tuple[int, ...] = ()  # the minority; empty if neither side is larger
    findings: tuple[Finding, ...] = ()
    text: str = ""  # of the report on that step, or of the last report if all was equal
    not_compared: tuple[str, ...] = ()  # "parameter 0.weight": those that could not be compared
    held_once: dict[str, int] = field(default_factory=dict)  # kind → tensors on one rank only

    @property
    def unproved(self) -> str:
        """Return why this does not prove the replicas equal, in capitals; "" if it does."""
        once = self.held_once.get("parameter") and not self.compared.get("parameter")
        return "NOT ALL COMPARED" if self.not_compared else "NOTHING TO COMPARE" if once else ""

    @property
    def failed(self) -> bool:
        """Whether a compared tensor or number differs or is not finite."""
        wrong = any(finding.severity == "error" for finding in self.findings)
        return not self.equal or wrong or not (self.ok or self.unproved)


@dataclass(frozen=True)
class StepSummary:
    """Statistics of the rounds of one case."""

    rounds: int  # each arm was measured once in each
    in_a_row: int  # steps of an arm in one round
    warm_up: int  # steps before the first round
    step: Figure  # time of steps in a row / their number, synchronised at both ends; slowest rank
    samples_per_second: float  # of all ranks; 0: unknown
    phases: tuple[Phase, ...]
    budget: tuple[Part, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    collectives: tuple[Collective, ...] = ()  # of a sharded step, in the order of the first calls
    peak_nbytes: int = 0  # memory at the peak of a step, of the rank that needs most; 0: unknown


@dataclass(frozen=True)
class StepResult:
    """One DDP step in one launch: measured, or skipped on all ranks together for a reason."""

    case: StepCase
    launch: int
    reason: str | None = None
    cold_seconds: float | None = None  # the first step
    stop_reason: str | None = None
    summary: StepSummary | None = None
    replicas: Replicas | None = None
    losses: tuple[float, ...] = ()  # of each rank's own last batch
    notes: tuple[str, ...] = ()  # parts that could not be measured, and why
    others_share: float | None = None
    wall_seconds: float = 0.0
    block: int = 0  # of tune: each block measures each setting once
    watched: Watched | None = None  # of a job that `watch` observed


@dataclass(frozen=True)
class Examination:
    """The result of one examination of the doctor in one launch."""

    name: str  # "preflight", "links", …
    launch: int
    backend: str
    seconds: float
    told: tuple[str, ...] = ()  # results, one line each
    unchecked: tuple[str, ...] = ()  # questions without an answer, each with the reason
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)  # JSON; documented in doctor/NAME/
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Run:
    """The record that one command stored."""

    id: str
    command: str
    command_line: tuple[str, ...]
    plan: Plan
    started: str
    schema: int = SCHEMA
    state: str = "running"  # then "complete", "interrupted" or "failed"
    state_reason: str | None = None
    exit_code: int | None = None
    ended: str | None = None
    operations: tuple[str, ...] = ()  # or workloads, in the requested order
    backends: tuple[str, ...] = ()
    launches: tuple[Launch, ...] = ()
    results: tuple[Result, ...] = ()
    steps: tuple[StepResult, ...] = ()
    examinations: tuple[Examination, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def outcomes(self) -> tuple[Result | StepResult, ...]:
        """All cases that were measured or skipped, of any kind."""
        return (*self.results, *self.steps)

    @property
    def everything(self) -> tuple[Result | StepResult | Examination, ...]:
        """All cases that were measured or skipped, and all examinations."""
        return (*self.outcomes, *self.examinations)
