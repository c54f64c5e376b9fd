"""Runs → sections → one HTML file with everything in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpbench.report.chart import MakeSection, ReportRun, Section
from ddpbench.report.sections import collectives, links

if TYPE_CHECKING:
    import jinja2

# In the order of the page: one entry adds a section.
SECTIONS: tuple[MakeSection, ...] = (collectives.section, links.section)


def make_sections(runs: Sequence[ReportRun]) -> list[Section]:
    """Return the sections that these runs have, in the order of the page."""
    return [section for make in SECTIONS if (section := make(runs)) is not None]


def make_page(runs: Sequence[ReportRun], verdicts: Sequence[Section] = (), title: str = "") -> str:
    """Return the page of these runs: HTML that loads nothing.

    verdicts: sections on a comparison of the runs, shown before theirs. title: default: their
    labels; a page without runs needs one.
    """
    from vl_convert import javascript_bundle

    from ddpbench.report.theme import CONFIGS

    return (
        _environment()
        .get_template("page.html")
        .render(
            title=title or " and ".join(run.label for run in runs),
            sections=[*verdicts, *make_sections(runs)],
            configs=CONFIGS,
            bundle=javascript_bundle("window.vegaEmbed = vegaEmbed;"),
        )
    )


def _environment() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("ddpbench.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
