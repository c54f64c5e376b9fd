"""The settings that `ddpbench tune` has tried: one table and one chart per workload and backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpbench.analysis import steps
from ddpbench.analysis.tuning import Setting, Verdict, judge_runs
from ddpbench.catalog.hooks import HOOKS
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars
from ddpbench.present.document import Chart, plain_name, tabulate_rows
from ddpbench.present.steps.columns import format_ms
from ddpbench.records.schema import Figure, Run, StepSummary

CAPTION = (
    "Change of the time of a step from the default, per micro-batch: median over blocks, and its "
    "interval."
)
LEGEND = (
    "change: time of a step with the setting / with the default of the same block - 1; interval: "
    "corrected for the number of finalists, which the last blocks measured; earlier blocks only "
    "choose them",
    "exposed: exposed communication in the first block; MB: gradients that each rank reduces",
)


def build_tuning(run: Run) -> Iterator[Chart]:
    """Yield the settings of each workload and backend."""
    for verdict in judge_runs(run):
        case = verdict.settings[0].case
        title = f"{case.workload} on {case.backend}"
        ranked = sorted(verdict.settings, key=lambda s: _sort_key(s, verdict))
        table = tabulate_rows(title, [_format(s, verdict) for s in ranked], ("setting", "note"))
        name = f"tune-{plain_name(title)}"
        yield Chart(name, title, CAPTION, table, _draw(ranked, verdict))


def _sort_key(setting: Setting, verdict: Verdict) -> tuple[bool, float]:
    figure = verdict.changes.get(setting.label)
    return setting.seconds is None, 0.0 if figure is None else figure.value


def _format(setting: Setting, verdict: Verdict) -> dict[str, Any]:
    default, figure = verdict.settings[0], verdict.changes.get(setting.label)
    summary = next((r.summary for r in setting.results if r.summary and r.summary.budget), None)
    exposed = (
        next((p for p in summary.budget if p.name == steps.EXPOSED), None) if summary else None
    )
    return {
        "setting": setting.label,
        "step ms": format_ms(setting.seconds, default.seconds),
        "change": "-" if figure is None else f"{figure.value:+.1%}",
        "interval": _format_interval(figure),
        "exposed ms": format_ms(exposed.figure.value if exposed else None, default.seconds),
        "MB": _format_megabytes(setting, summary),
        "blocks": str(len(setting.times)),
        "note": _note(setting, verdict),
    }


def _format_interval(figure: Figure | None) -> str:
    if figure is None or figure.interval is None:
        return "-"
    return f"[{figure.interval.low:+.1%}, {figure.interval.high:+.1%}]"


def _format_megabytes(setting: Setting, summary: StepSummary | None) -> str:
    hook = HOOKS.get(setting.case.comm_hook)
    if summary is None or not summary.buckets or hook is None or hook.share is None:
        return "-"
    return f"{sum(bucket.nbytes for bucket in summary.buckets) * hook.share / 1e6:.2f}"


def _note(setting: Setting, verdict: Verdict) -> str:
    if setting.reason is not None:
        return f"skipped: {setting.reason}"
    if setting is verdict.best:
        return "recommended"
    return "changes the numbers" if setting.changes_numbers else ""


def _draw(settings: list[Setting], verdict: Verdict) -> Bars | None:
    rows = []
    for setting in settings:
        figure = verdict.changes.get(setting.label)
        if figure is not None:
            interval = figure.interval
            rows.append(
                {
                    "setting": setting.label,
                    "change": f"{figure.value:+.1%}",
                    "interval": _format_interval(figure),
                    "_begin": 0.0,
                    "_end": figure.value,
                    "_low": interval.low if interval else float("nan"),
                    "_high": interval.high if interval else float("nan"),
                }
            )
    if not rows:
        return None
    return Bars(
        data=rows,
        x=Axis("change of a step", theme.SHARE_LABELS),
        row="setting",
        color="",
    )
