"""Examinations on a page."""

from typing import Any

from stored_runs import a_run

from ddpbench.present.document import ReportRun, Section
from ddpbench.present.examinations import build_sections
from ddpbench.records.schema import Examination
from ddpbench.records.table import Table, TableColumn


def run_of(*examined: Examination, **other: Any) -> ReportRun:
    """Return a run of these examinations."""
    return ReportRun("a-run", a_run(examinations=examined, **other))


def section_of(*examined: Examination) -> Section:
    """The section of such a run on a page."""
    (section,) = build_sections(run_of(*examined), drawn=True)
    return section


def test_an_examination_of_a_plug_in_appears() -> None:
    """With its lines and its table, although the page does not know it."""
    columns = (TableColumn("disk"), TableColumn("write MB/s"))
    table = Table("write speed", columns, (("sda", 512.0), ("sdb", 64.0)))
    one = Examination("disk", 0, "gloo", 1.0, ("wrote a file",), tables=(table,))
    section = section_of(one)
    (chart,) = section.charts
    assert (chart.title, chart.table) == ("Write speed", table)
    assert section.lines == ("Wrote a file.",)


def test_launches_share_what_is_the_same() -> None:
    """Facts stand once for each backend, other tables for each launch; one table has all lines."""
    facts = Table("host", (TableColumn(), TableColumn()), (("name", "a"),))
    rates = Table("rates", (TableColumn("MB/s"),), ((1.0,),))
    launches = [
        Examination("disk", n, "gloo", 1.0, ("wrote a file",), tables=(facts, rates))
        for n in range(2)
    ]
    section = section_of(*launches)
    titles = ["Host, launch 0", "Rates, launch 0", "Rates, launch 1", "Results"]
    assert [chart.title for chart in section.charts] == titles
    assert section.charts[-1].table.rows == (("launch 0; launch 1", "Wrote a file."),)
