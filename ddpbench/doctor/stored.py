"""Tables for runs that were stored before an examination stored its tables.

The figures of such a run contain everything that its tables show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ddpbench.doctor.capabilities import table as capabilities
from ddpbench.doctor.links import table as links
from ddpbench.doctor.preflight import table as preflight
from ddpbench.doctor.stragglers import table as stragglers
from ddpbench.records.schema import Examination, Run
from ddpbench.records.table import Table

# name of an examination → (its figures, backend) → its tables
TABLES: dict[str, Callable[[Mapping[str, Any], str], tuple[Table, ...]]] = {
    "preflight": preflight.build_tables,
    "stragglers": stragglers.build_tables,
    "links": links.build_tables,
    "capabilities": capabilities.build_tables,
}


def add_tables(run: Run) -> Run:
    """Return the run with a table wherever one can be built from the figures."""
    return replace(run, examinations=tuple(map(_add_tables, run.examinations)))


def _add_tables(examination: Examination) -> Examination:
    build_tables = TABLES.get(examination.name)
    if examination.tables or build_tables is None:
        return examination
    return replace(examination, tables=build_tables(examination.figures, examination.backend))
