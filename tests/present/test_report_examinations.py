"""Stragglers, capabilities and preflight on a page."""

from typing import Any

from drawn import values
from frozen import Frozen
from stored_runs import a_run, with_tables

from ddpbench.doctor.capabilities.judge import OUTCOMES, UNTRIED
from ddpbench.doctor.stragglers import judge
from ddpbench.present.doctor import capabilities, stragglers
from ddpbench.present.doctor.section import build_sections
from ddpbench.present.document import Chart, ReportRun, Section
from ddpbench.present.writers import page
from ddpbench.records.schema import Examination, Finding
from ddpbench.records.table import Table, TableColumn


def run_of(*examined: Examination, **other: Any) -> ReportRun:
    """A run of these examinations, with the tables that their figures give."""
    return ReportRun("a-run", with_tables(a_run(examinations=examined, **other)))


def section_of(*examined: Examination) -> Section:
    """The section of such a run on a page."""
    (section,) = build_sections([run_of(*examined)], page.EXAMINATIONS)
    return section


def charts(section: Section) -> dict[str, Chart]:
    """The charts of a section by name."""
    return {chart.name: chart for chart in section.charts}


def examined_ranks(
    matmul: list[float], launch: int = 0, backend: str = "gloo", code: str = "slow-rank",
    wait: float | None = 1e-3, **other: Any
) -> Examination:  # fmt: skip
    """Ranks that need so many seconds for 1 GFLOP alone, and twice as many all at once; the doctor
    names rank 1."""
    ranks = [
        {"host": "node", "wait_seconds": wait, "hertz": None, "neighbours": [],
         "seconds": {when: {"matmul": s * factor, "memory copy": 0.1}
                     for when, factor in (("alone", 1), ("together", 2))},
         "kept": {"alone": {"queued": 0.25, "throttled": None, "stolen": 0.0}}}
        for s in matmul
    ]  # fmt: skip
    loads = {
        "matmul": {"amount": 1e9, "unit": "GFLOP/s"},
        "memory copy": {"amount": 1e9, "unit": "GB/s"},
    }
    figures = {"loads": loads, "work_seconds": 5e-3, "passes": 3, "ranks": ranks}
    named = (Finding("warning", code, "rank 1 is slow", "", {"rank": 1, "host": "node"}),)
    findings = other.pop("findings", named)
    return Examination(
        "stragglers", launch, backend, 1.0, figures=figures, findings=findings, **other
    )


def test_a_slow_rank_is_marked_at_the_loads_at_which_it_is_slow(frozen: Frozen) -> None:
    """Not at others; the table says so too, and a rank that only seems slow is not marked."""
    found = charts(section_of(examined_ranks([0.1, 0.2, 0.1])))
    marked = [(v["rank"], v["series"]) for v in values(found["stragglers-matmul"]) if v["_marked"]]
    assert marked == [(1, "alone"), (1, "all at once")]
    rates = [row[-1] for row in found["stragglers-matmul"].table.rows]
    assert rates == ["10", "5 slow", "10", "5", "2.5 slow", "5"]
    assert not any(v["_marked"] for v in values(found["stragglers-memory-copy"]))
    frozen.text(found["stragglers-matmul"].caption)
    assert stragglers.RATIO == judge.RATIO
    quiet = charts(section_of(examined_ranks([0.1, 0.2, 0.1], findings=())))
    assert not any(v["_marked"] for v in values(quiet["stragglers-matmul"]))


def test_a_late_rank_is_marked_where_the_ranks_wait() -> None:
    """It waits least, so that colour and height alone would hide it."""
    found = charts(section_of(examined_ranks([0.1, 0.1], code="late-rank")))
    waits = {v["rank"]: (v["_y"], v["_marked"]) for v in values(found["stragglers-wait"])}
    assert waits == {0: (1.0, ""), 1: (1.0, "late")}


def tried(*outcomes: str, launch: int = 0, backend: str = "gloo") -> Examination:
    """An all_reduce of one dtype for each outcome, and a barrier, which works."""
    verdicts = [
        {"operation": "all_reduce", "form": "tensor", "reduce_op": "sum", "dtype": f"int{n}",
         "outcome": outcome, "why": "" if outcome == "ok" else f"because {n}"}
        for n, outcome in enumerate(outcomes)
    ]  # fmt: skip
    barrier = {"operation": "barrier", "form": "tensor", "reduce_op": None, "dtype": None,
               "outcome": "ok", "why": ""}  # fmt: skip
    figures = {"ranks": 2, "elements": [64], "wanted": 5, "verdicts": [*verdicts, barrier]}
    return Examination("capabilities", launch, backend, 1.0, figures=figures)


def test_each_outcome_has_a_symbol_of_its_own() -> None:
    """Colour alone says nothing; a reason is in the tooltip, and the doctor's table below."""
    outcomes = ("ok", "unsupported", "wrong", "crash", "hang")
    chart = charts(section_of(tried(*outcomes)))["capabilities-1"]
    cells = [cell for cell in values(chart) if cell["call"] == "all_reduce"]
    assert [cell["_text"] for cell in cells] == ["✓", "–", "W", "C", "H"]
    assert [cell["why"] for cell in cells] == ["", *(f"because {n}" for n in range(1, 5))]
    assert len(set(capabilities.OUTCOMES.values())) == len(capabilities.OUTCOMES)
    assert {*(each.cell for each in OUTCOMES.values()), UNTRIED} <= set(capabilities.OUTCOMES)


def test_an_examination_of_a_plug_in_appears() -> None:
    """With its tables and lines, although the page does not know it."""
    table = Table("write speed", (TableColumn("rank"), TableColumn("MB/s")), ((0, 512.0),))
    one = Examination("disk", 0, "gloo", 1.0, ("wrote a file",), tables=(table,))
    section = section_of(one)
    (chart,) = charts(section).values()
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


def test_no_line_ends_inside_an_option_or_before_a_unit() -> None:
    """A text is escaped, options stay whole, and a command keeps its plain spaces."""
    text = page.keep_together("a <b> takes 33.3 ms: try --bucket-cap-mb 5 s")
    assert text == (
        "a &lt;b&gt; takes 33.3\N{NO-BREAK SPACE}ms: try "
        '<span class="option">--bucket-cap-mb</span> 5\N{NO-BREAK SPACE}s'
    )
    assert "\N{NO-BREAK SPACE}" not in page.keep_together("sleep 5 s", units=False)
