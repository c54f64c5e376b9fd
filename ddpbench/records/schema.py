"""What a run stores: frozen dataclasses, base units, the unit in the name, one version number.

Raw samples lie beside these records as Parquet. A `Summary` can be derived from them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpbench.records.launched import Launch
from ddpbench.records.load import Load
from ddpbench.records.table import Table
from ddpbench.records.watched import Watched

SCHEMA = 1
SEVERITIES = ("error", "warning", "note")  # of findings, the worst first
# What a time is: of the host; between events on the device; without the launch; with stream waits
EXIT_ENTRY, EVENTS, HIDDEN_LAUNCH = "exit-entry", "events", "hidden-launch"
TWO_STREAMS = "hidden-launch-two-streams"
LAUNCH_HIDDEN = (HIDDEN_LAUNCH, TWO_STREAMS)


@dataclass(frozen=True)
class Case:
    """The identity of one measured thing. Numbers whose cases differ are incomparable."""

    operation: str
    form: str  # "tensor": one tensor a side; "list": a list of tensors, one a rank
    backend: str
    provider: str  # who implements the backend: "native", "mpi4py", …
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
    depth: int  # operations in flight; 0: not told
    world_size: int
    ranks_per_host: tuple[int, ...]  # empty: not told
    buffers: str = "torch"  # whose memory: torch's own, or "huge", which asks for huge pages
    size_convention: str = "total"
    time_definition: str = EXIT_ENTRY
    clock: str = "host"
    rank_reduction: str = "max"
    statistic: str = "median"
    # Who works together: "host", the ranks of each host; "cross", one of each host; "world", all.
    # What is said above of ranks is of one such group.
    group: str = "world"
    groups: int = 1  # that work at once

    @property
    def called(self) -> str:
        """The operation, and of whom where it is not of all ranks: "all_reduce (host groups)"."""
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
    verify: int = 1  # DDP steps from one verification of the replicas to the next; 0: none
    timeout_seconds: float = 60.0  # of one wait
    fail_on: str = "error"  # the least severity of a finding for which the exit code is 1
    seed: int = 0


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a median."""

    low: float
    high: float
    confidence: float
    of: str  # what the interval is of, and over what: "median of 6 batch medians", …


@dataclass(frozen=True)
class Summary:
    """What the timed repetitions of one case say; seconds of ONE operation.

    `median_seconds` and the percentiles are of t_max, the largest (exit - entry) of a repetition.
    Of another tool's log `median_seconds` is what `statistic` and `rank_reduction` of its case say,
    and what that tool does not tell is None.
    """

    repetitions: int  # 0: not told
    median_seconds: float
    interval: Interval | None
    mean_seconds: float
    min_seconds: float | None
    max_seconds: float | None
    percentiles_seconds: dict[str, float]  # those that have a 95 % interval over some launches
    rank_mean_seconds: float | None  # median of the mean over ranks
    rank_min_seconds: float | None  # median of the fastest rank
    skew_seconds: float | None  # median of (last entry - first entry); None where clocks differ
    last_in_seconds: float | None  # median of (last exit - last entry)
    global_seconds: float | None  # median of (last exit - first entry)
    outliers: int | None  # beyond 1.5 interquartile ranges; counted, never dropped
    far_outliers: int | None  # beyond 3
    lag1: float | None  # autocorrelation of neighbouring repetitions
    # Of t_max, the least to the largest in steps of 5 %: what tells two usual times, and the lower
    # quartile; empty in runs stored before, and where a repetition is several calls.
    quantiles_seconds: tuple[float, ...] = ()
    # Mean over repetitions and ranks of (exit - entry) by the host's clock: the figure of OSU, and
    # of nccl-tests. None: not told, or stored before there was this field.
    overall_mean_seconds: float | None = None
    # Until the call returns to the host, on the slowest rank: median. None: not a time of its own.
    launch_seconds: float | None = None


@dataclass(frozen=True)
class Wrong:
    """One rank's first wrong element."""

    rank: int  # -1: not told
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
    least_nbytes: float  # what a rank must move at least, whatever the algorithm
    requested_nbytes: int
    reason: str | None = None  # why there is nothing: skipped
    calls: int = 1  # operations in one repetition: in flight, batched, or both ways of a ping-pong
    batch: int = 1  # of these, how often the call was repeated because it is too short to stamp
    cold_seconds: float | None = None  # the first call, never mixed in
    warm_up: int = 0
    stop_reason: str | None = None
    summary: Summary | None = None
    checks: int = 0
    wrong: tuple[Wrong, ...] = ()
    limit: Limit | None = None
    hard_limit: Limit | None = None
    # Of the cores' time that other processes used; over the cases before too, where this one was
    # too short to tell.
    others_share: float | None = None
    measuring_seconds: float = 0.0  # in warm-up and timed repetitions
    wall_seconds: float = 0.0  # of the whole case
    # What stamps of different ranks, in rank 0's clock, may be off against each other at most; 0.0:
    # all read one clock; None: not known. Above 5 % of a repetition there is no skew.
    clock_off_seconds: float | None = None
    # Of the buffers' bytes the share in huge pages, in the rank that has least; None: not known.
    huge_share: float | None = None
    # Page faults in one timed repetition, the mean of the rank that has most; None: not known.
    page_faults: float | None = None
    # A cache line from one rank's core to its neighbour's and back, after the case; of the slowest
    # pair of ranks. None: not known.
    handoff_seconds: float | None = None
    # Share of the timed repetitions whose launch was not hidden, in the rank that has most.
    unhidden_share: float | None = None


LEFT_OUT = "left-out"  # the code of a finding: what of a log is missing or not read


@dataclass(frozen=True)
class Finding:
    """A fact with a severity, a code, a place, one sentence and a next step."""

    severity: str  # one of SEVERITIES
    code: str
    sentence: str
    next_step: str = ""
    place: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepCase:
    """The identity of one measured DDP step. Numbers whose cases differ are incomparable.

    Of a job that `watch` explained only the script, its arguments and its ranks are known: 0, False
    or "" of the model, its data and its optimizer: not told.
    """

    workload: str  # its name, the user's "package.module:function", or the watched script
    settings: tuple[str, ...]  # "width=1024", …: all that shape the model and its data
    parameters: int
    parameter_nbytes: int
    backend: str
    provider: str
    device: str
    batch: int  # samples of one rank in one micro-batch
    accumulate: int  # micro-batches of a step
    optimizer: str
    amp: str | None  # "bf16"
    bucket_cap_mb: float | None  # None: DDP's default, whose first bucket is smaller
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    comm_hook: str  # "none", "fp16", …
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
    """A median over rounds, in seconds unless said otherwise, and its interval."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Phase:
    """A part of the DDP step as it was timed in every rank."""

    name: str  # "forward", "backward", "optimizer", "step"
    slowest: Figure  # of the slowest rank of each step
    fastest_seconds: float  # median of the fastest rank of each step
    slowest_rank: int  # the rank that was it most often
    slowest_share: float  # in this share of the steps; 0: not told


@dataclass(frozen=True)
class Part:
    """A part of the step that is known from a difference of arms, paired round by round."""

    name: str
    figure: Figure
    share: float | None  # of the step
    resolved: bool  # its interval is clear of 0: it is more than noise
    rank: int | None = None  # that is to blame
    source: str = ""  # "arms": a difference of arms; "spans": timed collectives; "": not told


@dataclass(frozen=True)
class Bucket:
    """One bucket of DDP's, as a timing hook saw it."""

    index: int  # in the order of reduction
    nbytes: int
    parameters: int
    first: str  # name of the first parameter in it
    last: str
    handed_seconds: float  # from the start of backward until the last rank hands it over, median
    wire: Figure  # the least over ranks of (reduced - handed over)
    wait: Figure  # the most over ranks of it, less the wire
    late_rank: int | None  # for which the others wait; None: none stands out of the noise


@dataclass(frozen=True)
class Collective:
    """What a layer group communicates by one operation in one phase of a step."""

    layers: str  # "blocks.3", or "root" for what no other group has
    phase: str  # "forward", "backward"
    operation: str
    calls: int  # in a step
    nbytes: int  # of these calls together: of the total buffers
    exposed: Figure  # how long the compute waits for it, on the rank that waits least
    hidden: Figure  # while it is on its way and the compute goes on
    wait: Figure  # the most over ranks of the exposed time, less the least
    late_rank: int | None  # for which the others wait; None: none stands out of the noise


@dataclass(frozen=True)
class Replicas:
    """What the verifications of one case found."""

    verified: int  # steps
    last_step: int  # the number of the last of them; steps count from 1, warm-up first
    equal: bool  # what was compared
    ok: bool  # and all is finite, and all was compared
    compared: dict[str, int]  # kind → how many tensors and numbers
    nbytes: int  # of them, in one rank
    cost: Figure | None  # of one verification, the slowest rank's
    share: float | None  # of a step
    differing: int = 0  # verifications in which they were not equal, or not finite
    buffers: int = 0  # that differed in the last one, as those do that DDP sends anew
    equal_until: int | None = None  # the last step after which they were found equal
    first_bad: int | None = None  # the first after which they were not
    tensors: tuple[str, ...] = ()  # "parameter 0.weight": those that differed there
    ranks: tuple[int, ...] = ()  # the minority; empty where no side is the larger
    findings: tuple[Finding, ...] = ()
    text: str = ""  # of that report; of the last where all was equal
    not_compared: tuple[str, ...] = ()  # "parameter 0.weight": those that could not be compared
    held_once: dict[str, int] = field(default_factory=dict)  # kind → tensors not held twice

    @property
    def unproved(self) -> str:
        """What keeps this from being a proof, in capitals; "" if nothing does."""
        once = self.held_once.get("parameter") and not self.compared.get("parameter")
        return "NOT ALL COMPARED" if self.not_compared else "NOTHING TO COMPARE" if once else ""

    @property
    def failed(self) -> bool:
        """Whether something that was compared differs or is not finite."""
        wrong = any(finding.severity == "error" for finding in self.findings)
        return not self.equal or wrong or not (self.ok or self.unproved)


@dataclass(frozen=True)
class Epoch:
    """One epoch of a training that goes to its end."""

    number: int  # from 1
    train_loss: float | None  # mean over the samples of all ranks; None: NaN or infinite
    validation_loss: float | None  # the same, each sample counted once
    seconds: float
    replicas_equal: bool | None = None  # None: not verified
    # Of equal parts of the epoch's steps, in order; empty: one part, or stored before there was it.
    train_losses: tuple[float | None, ...] = ()
    load: Load | None = None  # during the epoch; None: stored before there was this field


@dataclass(frozen=True)
class StepSummary:
    """What the rounds of one case say."""

    rounds: int  # each arm was measured once in each
    in_a_row: int  # steps of an arm in one round
    warm_up: int  # steps before
    step: Figure  # steps in a row / their number, synchronised at both ends; the slowest rank's
    samples_per_second: float  # of all ranks; 0: not told
    phases: tuple[Phase, ...]
    budget: tuple[Part, ...] = ()
    speed_up: Figure | None = None  # a factor: the step without any communication
    timers: dict[str, float] = field(default_factory=dict)  # DDP's own: name → seconds, median
    buckets: tuple[Bucket, ...] = ()
    observer: Part | None = None  # what timing the buckets or collectives adds to a step
    collectives: tuple[Collective, ...] = ()  # of a sharded step, in the order of the first calls
    peak_nbytes: int = 0  # memory at the peak of a step, of the rank that needs most; 0: not known


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
    epochs: tuple[Epoch, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be measured, and why
    others_share: float | None = None
    wall_seconds: float = 0.0
    watched: Watched | None = None  # of a job that `watch` explained


@dataclass(frozen=True)
class Examination:
    """The result of one examination of the doctor in one launch."""

    name: str  # "preflight", "links", …
    launch: int
    backend: str
    seconds: float
    told: tuple[str, ...] = ()  # results in a line each
    unchecked: tuple[str, ...] = ()  # questions without an answer, and the reason, a sentence each
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)  # JSON; documented in doctor/NAME/
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Run:
    """What one command stored."""

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
    operations: tuple[str, ...] = ()  # or workloads, in the order asked for
    backends: tuple[str, ...] = ()
    label: str = ""  # the user's own, of --label
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
        """All that was measured, skipped or examined."""
        return (*self.outcomes, *self.examinations)
