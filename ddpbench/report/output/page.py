"""Runs → sections → one HTML file with everything in it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING

from ddpbench.records.schema import Finding
from ddpbench.report.chart import Chart, MakeSection, ReportRun, Section
from ddpbench.report.output import embedding
from ddpbench.report.sections import (
    capabilities,
    cases,
    collectives,
    environment,
    examinations,
    links,
    overview,
    replicas,
    skew,
    step,
    stragglers,
    training,
    watched,
)

if TYPE_CHECKING:
    import jinja2

# In the order of the page: one entry adds a section.
SECTIONS: tuple[MakeSection, ...] = (
    overview.section,
    collectives.section,
    stragglers.section,
    links.section,
    step.section,
    training.section,
    watched.section,
    replicas.section,
    cases.section,  # single repetitions come after what they make
    skew.section,
    capabilities.section,
    examinations.section,
    environment.section,
)


def make_sections(runs: Sequence[ReportRun], verdicts: Sequence[Section] = ()) -> list[Section]:
    """Return the sections that these runs have, in the order of the page: verdicts come second."""
    known = [finding for run in runs for finding in run.run.findings]
    sections = [section for make in SECTIONS if (section := make(runs)) is not None]
    return [*sections[:1], *verdicts, *(_without(known, each) for each in sections[1:])]


def _without(known: Sequence[Finding], section: Section) -> Section:
    """Leave out the findings that the summary has."""
    return replace(section, findings=tuple(f for f in section.findings if f not in known))


def make_page(runs: Sequence[ReportRun], verdicts: Sequence[Section] = (), title: str = "") -> str:
    """Return the page of these runs: HTML that loads nothing.

    verdicts: sections on a comparison of the runs, shown after their summary. title: default: their
    labels; a page without runs needs one.
    """
    from ddpbench.report.theme import CONFIGS, backend_swatches

    templates = _environment()
    sections = make_sections(runs, verdicts)
    charts = [chart for section in sections for chart in section.charts]
    scripts = (_bundle_vega(), templates.get_template("page.js").render())
    return templates.get_template("page.html").render(
        runs=[run.run for run in runs],
        title=title or " and ".join(run.label for run in runs),
        sections=sections,
        backends=backend_swatches(embedding.backends(charts)),
        operations=_distinct(chart.operation for chart in charts),
        configs=CONFIGS,
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
    )


@cache
def _bundle_vega() -> str:
    """Return the JavaScript that draws the charts. Making it takes a second."""
    from vl_convert import javascript_bundle

    return javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, names)))


def _hash(script: str) -> str:
    """Return the source expression of a content security policy that allows this script alone."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _height(chart: Chart) -> int:
    """Return the pixels that a chart will take at least, so that the page does not jump."""
    height = (chart.spec or {}).get("height")
    return int(height) if isinstance(height, (int, float)) else 240


def _environment() -> jinja2.Environment:
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("ddpbench.report.output", "templates"),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "embedded": embedding.json_in_html,
        "figure": embedding.figure,
        "table": embedding.table_data,
        "height": _height,
        "together": embedding.keep_together,
        "command": embedding.split_command,
        "command_line": embedding.command_line,
    }
    return templates
