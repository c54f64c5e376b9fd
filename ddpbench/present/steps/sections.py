"""DDP steps: table, timeline, breakdown and communication, then replicas and training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpbench.analysis import step_lines, steps
from ddpbench.analysis.step_lines import StepLine
from ddpbench.analysis.tuning import keep_default
from ddpbench.catalog.parallel import WAYS
from ddpbench.present.columns import choose_columns, explain, format_number, format_ranks
from ddpbench.present.document import Chart, ReportRun, Section, plain_name, show_rows
from ddpbench.present.header import of_watch
from ddpbench.present.steps.breakdown import build_breakdown
from ddpbench.present.steps.columns import STEP_COLUMNS
from ddpbench.present.steps.communication import build_buckets, build_layers
from ddpbench.present.steps.replicas import build_replicas
from ddpbench.present.steps.training import build_training
from ddpbench.records.schema import StepCase

PARTS = (steps.EXPOSED, steps.TRANSFER, steps.OVERHEAD, steps.HIDDEN, steps.WAITING)
BUCKETS = ("ready", "wire", "alone", "wait")
LEGEND = {
    "arm": "arm: a variant of the step: complete; without communication; also without bucket "
    "copies or with the prefetch switched; with timed buckets or collectives",
    steps.EXPOSED: "step = compute, copies and exposed communication; (x): noise, not clearly "
    "above 0",
    steps.TRANSFER: "exposed communication = exposed transfer + communication overhead; "
    "communication = exposed transfer + hidden",
    steps.OVERHEAD: "communication overhead: waking threads, bookkeeping, ranks out of step, "
    "backward slowed by hidden communication",
    steps.HIDDEN: "communication: while any bucket is on its way, in the rank that waits least; "
    "hidden: while backward computes",
    steps.WAITING: "waiting: how much longer the slowest rank computes than the others; a part of "
    "compute",
    "ready": "ready after: from the start of backward until the last rank hands the bucket over",
    "wire": "wire: from then until the bucket is reduced, including earlier buckets in the queue",
    "alone": "alone: the same reduction while nothing else runs; queue: an earlier bucket is in "
    "flight; contention: backward computes; alone, queue, contention and unexplained make the wire",
    "wait": "wait: how long the earliest rank waited for the latest; late rank: the latest, if the "
    "wait is more than noise",
    "from": "from arms: the difference of two variants of the step; from spans: how long the "
    "compute waits for a collective, in the rank that waits least",
    "collectives": "hidden: a collective is on its way and the compute goes on; MB: total buffers; "
    "wait: how much longer the rank that waits most is blocked",
}
TITLES = {"step": "DDP step", "replicas": "Replicas", "training": "Training"}


def build_sections(
    run: ReportRun, wanted: tuple[str, ...] | None = None, *, drawn: bool = False
) -> Iterator[Section]:
    """Yield the sections on the steps, the replicas and a training, then remarks.

    wanted: columns of the only table; None: the default ones, and all other tables. drawn: with
    timelines, and without watched jobs, which have a section of their own.
    """
    if drawn and of_watch(run.run):
        return
    reported = run.run
    if reported.command == "tune" and wanted is None:
        from ddpbench.present.steps.tuning import LEGEND as TUNING
        from ddpbench.present.steps.tuning import build_tuning

        tuned = tuple((chart,) for chart in build_tuning(reported))
        yield Section("tune", "Settings", rows=tuned, legend=TUNING)
        reported = keep_default(reported)
    known = step_lines.lines(reported)
    shown = [line for line in known if line.results]
    columns = choose_columns(wanted, STEP_COLUMNS, shown)
    groups: dict[StepCase, list[StepLine]] = {}
    for line in shown:
        groups.setdefault(step_lines.same_but_backend(line.case), []).append(line)
    charts: dict[str, list[Chart]] = {"step": [], "replicas": [], "training": []}
    for number, group in enumerate(groups.values()):
        name = plain_name(group[0].case.workload) + (f"-{number + 1}" if number else "")
        table = show_rows(_describe_case(group[0].case), columns, group)
        charts["step"].append(Chart(f"step-{name}", group[0].case.workload, table.title, table))
        if wanted is None:
            charts["step"] += _draw_timelines(f"step-{name}", run, group) if drawn else []
            charts["step"] += build_breakdown(f"step-{name}-budget", group)
            charts["step"] += build_buckets(f"step-{name}-buckets", group)
            charts["step"] += build_layers(f"step-{name}-layers", group)
            charts["replicas"] += build_replicas(f"replicas-{name}", group, run.run.plan.verify)
            charts["training"] += build_training(f"training-{name}", group, loads=drawn)
    legend = explain(shown, columns, step_lines.FLAGS) if shown else []
    legend += _legend(shown) if wanted is None else []
    for name, title in TITLES.items():
        if each := charts[name]:
            texts = tuple(legend) if name == "step" else ()
            yield Section(name, title, rows=tuple((chart,) for chart in each), legend=texts)
    if left_out := tuple(_left_out(known)):
        yield Section("remarks", "Remarks", lines=left_out)


def _draw_timelines(name: str, run: ReportRun, group: Sequence[StepLine]) -> Iterator[Chart]:
    from ddpbench.present.steps.timeline import draw_timeline  # loads pandas

    for line in group:
        case, twins = line.case, [x for x in group if x.case.backend == line.case.backend]
        by = "" if len(twins) == 1 else f" by {case.provider}"  # of a backend with two
        words = f"A step of {case.workload} on {case.backend}{by}"
        yield from draw_timeline(f"{name}-{plain_name(case.backend + by)}", words, run, line)


def _describe_case(case: StepCase) -> str:
    """Return the properties that all rows of a workload's tables share."""
    millions, nbytes = (
        format_number(case.parameters / 1e6),
        format_number(case.parameter_nbytes / 1e6),
    )
    times = f" × {case.accumulate}" if case.accumulate > 1 else ""
    model = f"{millions} M parameters ({nbytes} MB)  batch {case.batch} per rank{times}"
    parts = [
        case.workload,
        " ".join(case.settings),
        model if case.parameters else "",  # unknown for a watched job
        case.optimizer,
        f"autocast {case.amp}" if case.amp else "",
        "" if case.comm_hook in ("none", "") else f"hook {case.comm_hook}",
        "" if case.bucket_cap_mb is None else f"buckets of {case.bucket_cap_mb:g} MB",
        "gradients in buckets" if case.gradient_as_bucket_view else "",
        "static graph" if case.static_graph else "",
        "unused parameters searched" if case.find_unused_parameters else "",
        "" if case.broadcast_buffers else "buffers not broadcast",
        _format_parallel(case),
        format_ranks(case),
        case.device,
    ]
    return "  ".join(filter(None, parts))


def _format_parallel(case: StepCase) -> str:
    """Return the kind of parallel training and its mesh; "" for DDP."""
    if not case.mesh:
        return ""
    names = WAYS[case.parallel].dimensions if case.parallel in WAYS else ()
    sizes = [f"{name}={size}" for name, size in zip(names, case.mesh, strict=False)]
    prefetch = "  prefetch off" if case.prefetch is False else ""
    reshard = "  no reshard after forward" if case.reshard_after_forward is False else ""
    return f"{case.parallel} over {' × '.join(sizes)}{prefetch}{reshard}"


def _left_out(all_lines: list[StepLine]) -> list[str]:
    """Explain missing rows and figures; one line per reason."""
    reasons: dict[tuple[str, str, str], dict[str, None]] = {}
    for line in all_lines:
        case, notes = line.case, [note for result in line.results for note in result.notes]
        texts = [("note:", note) for note in notes]
        texts += [("skipped", line.reason)] if line.reason is not None else []
        for kind, text in texts:
            reasons.setdefault((kind, case.workload, text), {})[case.backend] = None
    return [
        f"{kind} {workload} on {', '.join(backends)}: {text}"
        for (kind, workload, text), backends in reasons.items()
    ]


def _legend(shown: list[StepLine]) -> list[str]:
    """Explain the headings of the breakdown, the buckets and the layer groups."""
    summaries = [line.summary for line in shown if line.summary]
    timed = any(summary.collectives for summary in summaries)
    needed = {
        "arm": bool(summaries),
        **{part: any(line.part(part) for line in shown) for part in PARTS},
        **dict.fromkeys(BUCKETS, any(summary.buckets for summary in summaries)),
        "alone": any(b.alone for summary in summaries for b in summary.buckets),
    }
    needed |= {"from": timed, "collectives": timed}
    return [LEGEND[name] for name, shown in needed.items() if shown]
