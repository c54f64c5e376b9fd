"""Stragglers, capabilities and preflight on a page."""

from typing import Any

import pytest
from frozen import Frozen
from stored_runs import a_run, with_tables

from ddpbench.doctor.capabilities.verdicts import CELLS, UNTRIED
from ddpbench.doctor.stragglers import judge
from ddpbench.records.schema import Examination, Finding
from ddpbench.records.table import Table, TableColumn
from ddpbench.report.chart import Chart, MakeSection, ReportRun, Section
from ddpbench.report.output import page
from ddpbench.report.sections import capabilities, examinations, stragglers


def run_of(*examined: Examination, **other: Any) -> ReportRun:
    """A run of these examinations, with the tables that their figures give."""
    return ReportRun("a-run", with_tables(a_run(examinations=examined, **other)))


def section_of(make: MakeSection, *examined: Examination) -> Section:
    """The section of such a run."""
    section = make([run_of(*examined)])
    assert section is not None
    return section


def charts(section: Section) -> dict[str, Chart]:
    """The charts of a section by name."""
    return {chart.name: chart for chart in section.charts}


def values(chart: Chart) -> list[dict[str, Any]]:
    """The values that a chart shows."""
    assert chart.spec is not None
    (rows,) = chart.spec["datasets"].values()
    return list(rows)


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
    found = charts(section_of(stragglers.section, examined_ranks([0.1, 0.2, 0.1])))
    marked = [(v["rank"], v["series"]) for v in values(found["stragglers-matmul"]) if v["mark"]]
    assert marked == [(1, "alone"), (1, "all at once")]
    assert found["stragglers-matmul"].table.rows[1] == (1, "node", "5 slow", "2.5 slow")
    assert not any(v["mark"] for v in values(found["stragglers-memory-copy"]))
    frozen.text(found["stragglers-matmul"].caption)
    assert stragglers.RATIO == judge.RATIO
    quiet = charts(section_of(stragglers.section, examined_ranks([0.1, 0.2, 0.1], findings=())))
    assert not any(v["mark"] for v in values(quiet["stragglers-matmul"]))


def test_a_late_rank_is_marked_where_the_ranks_wait() -> None:
    """It waits least, so that colour and height alone would hide it."""
    found = charts(section_of(stragglers.section, examined_ranks([0.1, 0.1], code="late-rank")))
    waits = {v["rank"]: (v["value"], v["mark"]) for v in values(found["stragglers-wait"])}
    assert waits == {0: (1.0, ""), 1: (1.0, "late")}


def test_what_is_unknown_or_never_happened_is_left_out() -> None:
    """Waits that were not measured; a reason that is unknown, or that held up no rank."""
    one = examined_ranks([0.1, 0.1], wait=None, told=("ranks compute",))
    section = section_of(stragglers.section, one)
    found = charts(section)
    assert set(found) == {"stragglers-matmul", "stragglers-memory-copy", "stragglers-held-up"}
    assert {v["series"] for v in values(found["stragglers-held-up"])} == {"waiting for a core"}
    assert section.lines == ("Ranks compute.",)
    assert charts(section_of(stragglers.section, examined_ranks([0.1]))) == {}


def test_launches_and_backends_share_a_chart(frozen: Frozen) -> None:
    """Their dots lie beside each other, and the table has a column for each."""
    several = [
        examined_ranks([0.1, 0.2], n, backend)
        for n, backend in enumerate(("gloo", "mpi", "gloo", "mpi"))
    ]
    chart = charts(section_of(stragglers.section, *several))["stragglers-matmul"]
    assert len(values(chart)) == 4 * 2 * 2
    frozen.text("\n".join(column.heading for column in chart.table.columns))
    assert chart.spec is not None
    assert [p["value"] for p in chart.spec["params"] if p["name"] == "backends"] == [
        ["gloo", "mpi"]
    ]


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
    chart = charts(section_of(capabilities.section, tried(*outcomes)))["capabilities-1"]
    cells = [cell for cell in values(chart) if cell["call"] == "all_reduce"]
    assert [cell["symbol"] for cell in cells] == ["✓", "–", "W", "C", "H"]
    assert [cell["why"] for cell in cells] == ["", *(f"because {n}" for n in range(1, 5))]
    assert len(set(capabilities.OUTCOMES.values())) == len(capabilities.OUTCOMES)
    assert {*CELLS.values(), UNTRIED} <= set(capabilities.OUTCOMES)


def test_an_equal_launch_is_not_drawn_again() -> None:
    """One matrix for each backend, and one more for a launch in which something else worked."""
    same = [tried("ok", launch=n) for n in range(3)]
    other = tried("ok", "hang", launch=3)
    mpi = tried("ok", launch=4, backend="mpi")
    assert len(charts(section_of(capabilities.section, *same, other, mpi))) == 3


def test_facts_of_several_launches_are_one_table() -> None:
    """A fact that differs names its launches; the order of the facts stays."""
    columns = (TableColumn(align="left"), TableColumn(align="left"))

    def preflight(launch: int, memory: str) -> Examination:
        table = Table("environment", columns, (("memory", memory), ("cpu", "X")))
        return Examination("preflight", launch, "gloo", 1.0, tables=(table,))

    (chart,) = charts(
        section_of(examinations.section, preflight(0, "1 GiB"), preflight(1, "2 GiB"))
    ).values()
    assert chart.spec is None
    assert chart.table.rows == (
        ("memory", "1 GiB (launch 0)"), ("memory", "2 GiB (launch 1)"), ("cpu", "X"),
    )  # fmt: skip


def test_an_examination_of_a_plug_in_appears() -> None:
    """With its tables and lines, although the page does not know it."""
    table = Table("write speed", (TableColumn("rank"), TableColumn("MB/s")), ((0, 512.0),))
    one = Examination("disk", 0, "gloo", 1.0, ("wrote a file",), tables=(table,))
    section = section_of(examinations.section, one)
    (chart,) = charts(section).values()
    assert (chart.title, chart.table) == ("disk: write speed", table)
    assert section.lines == ("Wrote a file.",)


def test_many_lines_are_a_table(frozen: Frozen) -> None:
    """Six launches would hide the charts below them."""
    several = [
        examined_ranks([0.1, 0.1], n, told=(f"line {n}",), unchecked=("the GPUs",))
        for n in range(6)
    ]
    section = section_of(stragglers.section, *several)
    assert section.lines == ()
    rows = charts(section)["stragglers-results"].table.rows
    assert len(rows) == 7
    frozen.text("\n".join(f"{launch}: {line}" for launch, line in rows[:2]))


@pytest.mark.parametrize("make", [stragglers.section, capabilities.section, examinations.section])
def test_a_run_without_examinations_has_none_of_these_sections(make: MakeSection) -> None:
    """And a run whose examination has no figures shows no chart."""
    assert make([ReportRun("a-run", a_run())]) is None
    for name in ("stragglers", "capabilities"):
        section = make([run_of(Examination(name, 0, "gloo", 1.0))])
        assert section is None or section.rows == ()


def test_no_line_ends_inside_an_option_or_before_a_unit() -> None:
    """A text is escaped, options stay whole, and a command keeps its plain spaces."""
    text = page.keep_together("a <b> takes 33.3 ms: try --bucket-cap-mb 5 s")
    assert text == (
        "a &lt;b&gt; takes 33.3\N{NO-BREAK SPACE}ms: try "
        '<span class="option">--bucket-cap-mb</span> 5\N{NO-BREAK SPACE}s'
    )
    assert "\N{NO-BREAK SPACE}" not in page.keep_together("sleep 5 s", units=False)
