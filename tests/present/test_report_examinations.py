"""Examinations on a page."""

from typing import Any

from drawn import values
from stored_runs import a_run

from ddpbench.present.document import ReportRun, Section
from ddpbench.present.examinations import build_sections
from ddpbench.records.schema import Examination, Finding
from ddpbench.records.table import Table, TableColumn


def run_of(*examined: Examination, **other: Any) -> ReportRun:
    """Return a run of these examinations."""
    return ReportRun("a-run", a_run(examinations=examined, **other))


def section_of(*examined: Examination) -> Section:
    """The section of such a run on a page."""
    (section,) = build_sections(run_of(*examined), drawn=True)
    return section


RATES = Table(
    "speed of each rank",
    (TableColumn("rank"), TableColumn("alone GFLOP/s"), TableColumn("all at once GFLOP/s"),
     TableColumn("host"), TableColumn("wait ms")),
    ((0, 10.0, 5.0, "a", 1.0), (1, 5.0, 2.5, "a", None), (2, 10.0, 5.0, "a", 3.0)),
)  # fmt: skip


def test_numbers_of_ranks_are_drawn_by_their_unit() -> None:
    """A chart for each unit; the points of a rank that a finding names are marked."""
    slow = Finding("warning", "slow-rank", "rank 1 is slow", "", {"rank": 1, "host": "a"})
    one = Examination("speeds", 0, "gloo", 1.0, findings=(slow,), tables=(RATES,))
    rates, waits, table = section_of(one).charts
    assert (rates.title, waits.title) == ("Alone, all at once", "Wait")
    assert [(v["rank"], v["series"], v["_y"]) for v in values(rates)] == [
        (0, "alone", 10.0), (1, "alone", 5.0), (2, "alone", 10.0),
        (0, "all at once", 5.0), (1, "all at once", 2.5), (2, "all at once", 5.0),
    ]  # fmt: skip
    assert {v["rank"] for v in values(rates) if v["_marked"]} == {1}
    assert [(v["rank"], v["ms"]) for v in values(waits)] == [(0, "1.000"), (2, "3.000")]
    assert table.table == RATES


def test_an_examination_of_a_plug_in_appears() -> None:
    """With its lines, its table and a chart of the table, although the page does not know it."""
    columns = (TableColumn("disk"), TableColumn("write MB/s"))
    table = Table("write speed", columns, (("sda", 512.0), ("sdb", 64.0)))
    one = Examination("disk", 0, "gloo", 1.0, ("wrote a file",), tables=(table,))
    section = section_of(one)
    drawn, chart = section.charts
    assert [(v["disk"], v["_end"]) for v in values(drawn)] == [("sda", 512.0), ("sdb", 64.0)]
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
