"""The tables of a run of DDP steps: phases, budget, buckets, replicas, training, legends."""

from __future__ import annotations

from collections.abc import Callable

from ddpbench.analysis import step_lines, steps
from ddpbench.analysis.step_lines import StepLine
from ddpbench.records.schema import Run, StepCase
from ddpbench.render import step_budget, step_replicas
from ddpbench.render.collective_columns import chosen, digits, ranks, text
from ddpbench.render.step_columns import STEP_COLUMNS
from ddpbench.render.style import Style

Columns = tuple[str, ...] | None


def blocks(run: Run, columns: Columns, quiet: bool, style: Style) -> list[str]:
    """All that stands under the header. With chosen columns one table a workload, of them."""
    everything = step_lines.lines(run)
    shown = [line for line in everything if line.results]
    names = chosen(columns, STEP_COLUMNS)
    groups: dict[StepCase, list[StepLine]] = {}
    for line in shown:
        groups.setdefault(step_lines.same_but_backend(line.case), []).append(line)
    out, starred = [], False
    for case, group in groups.items():
        best = step_lines.faster(group)
        starred |= best is not None
        out.append(style.block(title(case), _rows(group, best, names, style)))
        if columns is None:
            out += filter(None, (make(group, run, style) for make in TABLES))
    if not quiet:
        below = _left_out(everything), _legend(shown, names, starred, columns is None)
        out += [style.gap.join(told) for told in below if told]
    return out


def title(case: StepCase) -> str:
    """What all rows of a workload's tables have in common."""
    parts = [
        case.workload,
        " ".join(case.settings),
        f"{digits(case.parameters / 1e6)} M parameters ({digits(case.parameter_nbytes / 1e6)} MB)",
        f"batch {case.batch} a rank" + (f" × {case.accumulate}" if case.accumulate > 1 else ""),
        case.optimizer,
        f"autocast {case.amp}" if case.amp else "",
        "" if case.comm_hook == "none" else f"hook {case.comm_hook}",
        "" if case.bucket_cap_mb is None else f"buckets of {case.bucket_cap_mb:g} MB",
        "gradients in buckets" if case.gradient_as_bucket_view else "",
        "static graph" if case.static_graph else "",
        "unused parameters searched" if case.find_unused_parameters else "",
        ranks(case),
        case.device,
    ]
    return "  ".join(part for part in parts if part)


def _rows(group: list[StepLine], best: StepLine | None, names: list[str], style: Style) -> str:
    """A row a backend, the faster one marked."""
    cells = []
    for line in group:
        row = {name: text(line, name, STEP_COLUMNS) for name in names}
        if "backend" in row and line is best:
            row["backend"] += " *"
        cells.append(list(row.values()))
    return style.table(cells, [STEP_COLUMNS[name].head for name in names])


TABLES: tuple[Callable[[list[StepLine], Run, Style], str], ...] = (
    step_budget.budget,
    step_budget.buckets,
    step_replicas.replicas,
    step_replicas.training,
)


def _left_out(everything: list[StepLine]) -> list[str]:
    """Why cases have no row, and parts of others no figure; backends of one reason together."""
    told: dict[tuple[str, str, str], dict[str, None]] = {}
    for line in everything:
        case = line.case
        if line.reason is not None:
            told.setdefault(("skipped", case.workload, line.reason), {})[case.backend] = None
        for note in (note for result in line.results for note in result.notes):
            told.setdefault(("note:", case.workload, note), {})[case.backend] = None
    return [
        f"{kind} {workload} on {', '.join(backends)}: {words}"
        for (kind, workload, words), backends in told.items()
    ]


def _legend(shown: list[StepLine], names: list[str], starred: bool, tables: bool) -> list[str]:
    """What is not obvious in the columns and tables that were printed."""
    several = any(line.case.world_size > 1 for line in shown)
    buckets = any(line.summary and line.summary.buckets for line in shown)
    holds = {
        "step": "step_ms" in names and any(line.summary for line in shown),
        "slowest": "slowest_rank" in names and several,
        **{part: tables and any(line.part(part) for line in shown) for part in PARTS},
        **dict.fromkeys(("handed", "wait"), tables and buckets),
        "star": starred,
    }  # fmt: skip
    raised = {flag for line in shown for flag in line.flags} if "flags" in names else set()
    flags = [f"{name}: {words}" for name, (words, _) in step_lines.FLAGS.items() if name in raised]
    return [LEGEND[name] for name, held in holds.items() if held] + flags


PARTS = (steps.EXPOSED, steps.TRANSFER, steps.OVERHEAD, steps.HIDDEN, steps.WAITING)
LEGEND = {
    "step": "step ms: K steps together / K, median over rounds; 95 %: half-width of its interval; "
    "forward with zero_grad",
    "slowest": "slowest rank: in the forward (later the ranks wait for each other) most often, "
    "in which share of the steps",
    steps.EXPOSED: "step = compute + bucket copies + exposed communication; (x): noise, not "
    "clearly above 0",
    steps.TRANSFER: "exposed communication = exposed transfer + communication overhead; "
    "communication = exposed transfer + hidden",
    steps.OVERHEAD: "communication overhead: threads that wake up, bookkeeping, ranks out of step, "
    "backward slowed by what it hides",
    steps.HIDDEN: "communication: while any bucket is on its way, in the rank that waits least; "
    "hidden: while backward computes",
    steps.WAITING: "waiting: what the slowest rank alone takes longer than the others, a part of "
    "compute",
    "handed": "handed over: by the last rank, from the start of backward; wire: from then until "
    "reduced, behind earlier buckets too",
    "wait": "wait: what the first rank waited for the last; late rank: who was last, beyond noise",
    "star": "*: the faster backend, its interval clear of the others'",
}
