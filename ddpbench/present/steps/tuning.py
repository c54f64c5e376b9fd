"""The settings that `ddpbench tune` has tried: one table and one chart per workload and backend."""

from __future__ import annotations

from typing import Any

from ddpbench.analysis import steps
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars
from ddpbench.present.document import Chart, Section, plain_name, tabulate_rows
from ddpbench.present.steps.columns import format_ms
from ddpbench.records.schema import Figure, Run
from ddpbench.verdicts.tuning import Setting, Verdict, judge_runs

CAPTION = (
    "Change of the time of a step from the default, per micro-batch: median over blocks, and its "
    "interval."
)
LEGEND = (
    "change: time of a step with the setting / with the default of the same block - 1; interval: "
    "corrected for the number of finalists, which the last blocks measured; earlier blocks only "
    "choose them",
    "exposed: exposed communication in the first block",
)


def build_section(run: Run) -> Section:
    """Return the settings of each workload and backend, the fastest first."""
    charts, skipped = [], []
    for verdict in judge_runs(run):
        case = verdict.settings[0].case
        title = f"{case.workload} on {case.backend}"
        measured = [s for s in verdict.settings if s.seconds is not None]
        measured.sort(key=lambda s: verdict.changes[s.label].value if s.changes else 0.0)
        table = tabulate_rows(title, [_format(s, verdict) for s in measured], ("setting", "note"))
        name = f"tune-{plain_name(title)}"
        charts.append((Chart(name, title, CAPTION, table, _draw(measured, verdict)),))
        skipped += [f"skipped {s.label}: {s.reason}" for s in verdict.settings if s.reason]
    return Section("tune", "Settings", lines=tuple(skipped), rows=tuple(charts), legend=LEGEND)


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
        "blocks": str(len(setting.times)),
        "note": _note(setting, verdict),
    }


def _format_interval(figure: Figure | None) -> str:
    if figure is None or figure.interval is None:
        return "-"
    return f"[{figure.interval.low:+.1%}, {figure.interval.high:+.1%}]"


def _note(setting: Setting, verdict: Verdict) -> str:
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
