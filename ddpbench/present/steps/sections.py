"""DDP steps: table, timeline, breakdown and communication, then replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddpbench.analysis import step_lines, steps
from ddpbench.analysis.step_lines import StepLine
from ddpbench.catalog.parallel import WAYS
from ddpbench.present.columns import choose_columns, explain, format_number, format_ranks
from ddpbench.present.document import (
    Chart,
    ReportRun,
    Section,
    make_table,
    plain_name,
    show_rows,
    tabulate_rows,
)
from ddpbench.present.header import of_watch
from ddpbench.present.steps.breakdown import build_breakdown
from ddpbench.present.steps.columns import STEP_COLUMNS, format_ms, format_percent
from ddpbench.records.schema import Bucket, Collective, Replicas, StepCase
from ddpbench.records.wording import counted, list_kinds

PARTS = (steps.EXPOSED, steps.TRANSFER, steps.OVERHEAD, steps.HIDDEN, steps.WAITING)
EXPLAINED = ("alone", "queue", "contention", "unexplained")  # these add up to the wire
BUCKETS = ("ready", "wire", "alone", "wait")
LEGEND = {
    "arm": "arm: a variant of the step: complete; without communication; also without bucket "
    "copies; with timed buckets or collectives",
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
    "alone": "alone: the same reduction while nothing else runs; queue: other buckets are in "
    "flight; contention: backward computes; alone, queue, contention and unexplained make the wire",
    "wait": "wait: how long the earliest rank waited for the latest; late rank: the latest, if the "
    "wait is more than noise",
    "collectives": "hidden: a collective is on its way and the compute goes on; MB: total buffers; "
    "wait: how much longer the rank that waits most is blocked",
}
TITLES = {"step": "DDP step", "replicas": "Replicas"}


def build_sections(
    run: ReportRun, wanted: tuple[str, ...] | None = None, *, drawn: bool = False
) -> Iterator[Section]:
    """Yield the sections on the steps and the replicas, then remarks.

    wanted: columns of the only table; None: the default ones, and all other tables. drawn: with
    timelines, and without watched jobs, which have a section of their own.
    """
    if drawn and of_watch(run.run):
        return
    reported = run.run
    if reported.command == "tune" and wanted is None:
        from ddpbench.present.steps import tuning  # loads numpy

        yield tuning.build_section(reported)
        reported = step_lines.keep_default(reported)
    known = step_lines.lines(reported)
    shown = [line for line in known if line.results]
    columns = choose_columns(wanted, STEP_COLUMNS, shown)
    groups: dict[StepCase, list[StepLine]] = {}
    for line in shown:
        groups.setdefault(step_lines.same_but_backend(line.case), []).append(line)
    charts: dict[str, list[Chart]] = {"step": [], "replicas": []}
    for number, group in enumerate(groups.values()):
        name = plain_name(group[0].case.workload) + (f"-{number + 1}" if number else "")
        table = show_rows(_describe_case(group[0].case), columns, group)
        charts["step"].append(Chart(f"step-{name}", group[0].case.workload, table.title, table))
        if wanted is None:
            charts["step"] += _draw_timelines(f"step-{name}", run, group) if drawn else []
            charts["step"] += build_breakdown(f"step-{name}-budget", group)
            charts["step"] += _list_buckets(f"step-{name}-buckets", group)
            charts["step"] += _list_layers(f"step-{name}-layers", group)
            charts["replicas"] += _list_replicas(f"replicas-{name}", group, run.run.plan.verify)
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
    needed |= {"collectives": timed}
    return [LEGEND[name] for name, shown in needed.items() if shown]


# --- buckets and layer groups ---------------------------------------------------------------------

MOST_BUCKETS = 12  # rows of a text
NAME = 24  # characters of a parameter's name
MOST_LAYERS = 12  # rows; with more, equal layer groups share one


def _list_buckets(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield DDP's buckets in the order of reduction, if they were timed."""
    known = [(line, b) for line in group if line.summary for b in line.summary.buckets]
    if known:
        rows = [_format_bucket(line, bucket) for line, bucket in known]
        table = tabulate_rows("buckets", rows, ("parameters",))
        yield Chart(name, "Buckets", "", table, grouped=True, most=MOST_BUCKETS, spread=True)


def _format_bucket(line: StepLine, bucket: Bucket) -> dict[str, Any]:
    names = bucket.first, bucket.last
    first, last = (n if len(n) <= NAME else f"…{n[1 - NAME :]}" for n in names)
    return {
        "backend": line.case.backend,
        "#": str(bucket.index),
        "MB": f"{bucket.nbytes / 1e6:.2f}",
        "n": str(bucket.parameters),
        "parameters": first if bucket.parameters == 1 else f"{first} … {last}",
        "ready after ms": format_ms(bucket.handed_seconds, line.seconds),
        "wire ms": format_ms(bucket.wire.value, line.seconds),
        **{f"{name} ms": _format_figure(bucket, name, line) for name in EXPLAINED},
        "wait ms": format_ms(bucket.wait.value, line.seconds),
        "late rank": "-" if bucket.late_rank is None else str(bucket.late_rank),
    }


def _format_figure(bucket: Bucket, name: str, line: StepLine) -> str | None:
    figure = getattr(bucket, name)
    return None if figure is None else format_ms(figure.value, line.seconds)


def _list_layers(name: str, group: Sequence[StepLine]) -> Iterator[Chart]:
    """Yield the communication of each layer group, if the collectives were timed."""
    rows = [_format_layers(line, same) for line in group for same in _merge_layers(line)]
    if rows:
        table = tabulate_rows("layer groups", rows)
        yield Chart(name, "Layer groups", "", table, grouped=True)


def _merge_layers(line: StepLine) -> list[list[Collective]]:
    """Join layer groups of equal phase, operation and size if there are many; in call order."""
    collectives = line.summary.collectives if line.summary else ()
    merged: dict[tuple[Any, ...], list[Collective]] = {}
    for i, each in enumerate(collectives):
        alike = (each.phase, each.operation, each.nbytes, each.calls)
        merged.setdefault(alike if len(collectives) > MOST_LAYERS else (i,), []).append(each)
    return list(merged.values())


def _name_layers(same: Sequence[Collective]) -> str:
    first, last = same[0].layers, same[-1].layers
    return first if first == last else f"{first} … {last}"


def _format_layers(line: StepLine, same: Sequence[Collective]) -> dict[str, str]:
    exposed = sum(each.exposed.value for each in same)
    hidden = sum(each.hidden.value for each in same)
    late = sorted({each.late_rank for each in same if each.late_rank is not None})
    whole = exposed + hidden
    return {
        "backend": line.case.backend,
        "layers": _name_layers(same),
        "groups": str(len(same)),
        "phase": same[0].phase,
        "operation": same[0].operation,
        "MB": f"{sum(each.nbytes for each in same) / 1e6:.2f}",
        "exposed ms": format_ms(exposed, line.seconds),
        "hidden ms": format_ms(hidden, line.seconds),
        "hidden %": format_percent(hidden / whole if whole else None),
        "wait ms": format_ms(sum(each.wait.value for each in same), line.seconds),
        "late rank": " ".join(map(str, late)) or "-",
    }


# --- replicas -------------------------------------------------------------------------------------


def _list_replicas(name: str, group: Sequence[StepLine], every: int) -> Iterator[Chart]:
    """Yield the verdict on each backend and its cost.

    every: steps from one verification to the next.
    """
    rows = []
    for line in group:
        texts = _state_verdict(line, every)
        rows += [["" if i else line.case.backend, text] for i, text in enumerate(texts)]
    if rows:
        table = make_table("replicas", ("", ""), rows, ("",))
        yield Chart(name, f"Replicas of {group[0].case.workload}", "", table)


def _state_verdict(line: StepLine, every: int) -> Iterator[str]:
    replicas = line.replicas
    if replicas is None:
        if line.summary is not None:
            yield "not verified"
        return
    if line.case.world_size == 1:
        yield "one rank: there is no other replica to compare with"
        return
    if replicas.failed or replicas.unproved:
        yield _describe_failure(replicas) if replicas.failed else replicas.unproved
        yield from (f"  {text}" for text in replicas.text.splitlines())
    else:
        yield _describe_equality(line, replicas, every)
    if replicas.buffers and not replicas.failed:
        yield (
            f"except {replicas.buffers} of {replicas.compared.get('buffer', 0)} buffers, each "
            "rank's own statistics: DDP sends rank 0's before the next forward"
        )
    if replicas.cost is not None:
        share = "" if replicas.share is None else f" = {format_percent(replicas.share)} % of a step"
        yield f"one verification takes {format_ms(replicas.cost.value, line.seconds)} ms{share}"


def _describe_failure(replicas: Replicas) -> str:
    until, count = replicas.equal_until, replicas.differing
    verdict = "equal, but NOT FINITE" if replicas.equal else "NOT EQUAL"
    before = "" if until is None else f"; equal until step {until}"
    after = ""
    if replicas.last_step != replicas.first_bad:
        after = f"; the run went on, and {count} of {replicas.verified} verifications failed"
    return f"{verdict} after step {replicas.first_bad}{before}{after}"


def _describe_equality(line: StepLine, replicas: Replicas, every: int) -> str:
    count = counted(sum(r.replicas.verified for r in line.results if r.replicas), "step")
    when = f"after each of {count}" if every == 1 else f"after {count}, one in every {every}"
    launches = f" in {len(line.results)} launches" if len(line.results) > 1 else ""
    compared = f"{list_kinds(replicas.compared)} ({replicas.nbytes / 1e6:.1f} MB)"
    return f"replicas equal {when}{launches}, bit for bit: {compared}"
