"""A run as text: the content of each format, and machine formats that machines can read."""

import io
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from frozen import Frozen
from stored_runs import a_case, a_launch, a_result, a_run, a_summary
from text_tables import read_table

import ddpbench
from ddpbench import collectives
from ddpbench.analysis import lines
from ddpbench.records import codec, store
from ddpbench.records.schema import Finding, Limit, Run
from ddpbench.render import formats
from ddpbench.render.collective_columns import COLUMNS
from ddpbench.render.column import Column, digits, format_ranks
from ddpbench.render.formats import FORMATS
from ddpbench.session import options


def two_backends(**other: Any) -> Run:
    """Return a run of all_reduce on gloo and a faster mpi: two sizes, and one skipped on mpi."""
    results = []
    for nbytes in (4, 2**20):
        for index, (backend, seconds) in enumerate((("gloo", 2e-4), ("mpi", 1e-5))):
            case = a_case(backend=backend, nbytes=nbytes, count=nbytes // 4)
            results.append(a_result(case, index, summary=a_summary(seconds, 0.01)))
    big = a_case(nbytes=2**30, count=2**28, backend="mpi")
    skipped = replace(a_result(big, 1), summary=None, reason="no memory")
    return a_run(*results, skipped, **other)


# --- the text table -------------------------------------------------------------------------------


def test_the_interfaces_that_were_used_stand_above(frozen: Frozen) -> None:
    """The header has a line per kind of interface with its hosts, if anything left a host."""
    eth = {"name": "eth0", "mtu_nbytes": 1500, "nominal_bytes_per_second": 125e6}
    ib = {**eth, "name": "ib0", "nominal_bytes_per_second": None}
    used = (
        ("a", eth, ["10.0.0.1"]), ("a", eth, ["10.0.0.1"]), ("b", eth, ["10.0.0.2"]),
        ("c", ib, ["10.1.0.3", "10.0.0.3"]),
    )  # fmt: skip
    names = "hostname", "interface", "addresses"
    ranks = tuple(dict(zip(names, each, strict=True)) for each in used)
    run = two_backends()
    text = formats.table(replace(run, launches=(replace(run.launches[0], ranks=ranks),)))
    frozen.text("\n".join(line for line in text.splitlines() if line.startswith("net ")))
    assert "\nnet " not in formats.table(run)


def test_fits_of_ended_runs(frozen: Frozen) -> None:
    """A line below the table has the figures, the legend explains them; a run that still goes on,
    a quiet table and one whose times follow no line have neither."""

    def swept(saw: bool) -> Run:
        """20 µs and 1 GB/s; each launch is 1 % slower than the one before."""
        results = []
        for launch, power in itertools.product(range(6), range(7)):
            nbytes = 64 * 8**power
            seconds = 1e-3 * (9 if power % 2 else 1) if saw else 20e-6 + nbytes / 1e9
            case = a_case(nbytes=nbytes, count=nbytes // 4)
            results.append(a_result(case, launch, a_summary(seconds * 1.01**launch)))
        return a_run(*results)

    run, table = swept(saw=False), formats.table
    frozen.text("\n".join(line for line in table(run).splitlines() if line.startswith("fit")))
    assert "fit gloo" in table(replace(run, state="interrupted"))
    assert "fit" not in table(replace(run, state="running"))
    assert "fit" not in table(run, quiet=True)
    assert "fit" not in table(swept(saw=True))


@pytest.mark.parametrize("count", [1, 2, 6])
def test_launches_are_counted_for_each_backend(count: int, frozen: Frozen) -> None:
    """Launches are counted per backend: two backends with one launch each have one per backend."""
    launches = [a_launch(2 * n + i, b) for n in range(count) for i, b in enumerate(("gloo", "mpi"))]
    text = formats.table(two_backends(launches=tuple(launches)))
    (line,) = [line for line in text.splitlines() if line.startswith("launches ")]
    assert f" {count} launch" in line
    frozen.text(line)


def test_a_row_shows_what_its_heads_say() -> None:
    """Size, count, time in µs, half-width, p99, skew, GB/s, share of the limit, check and flags, as
    the line has them; every default column and no other."""
    case = a_case(nbytes=2**20, count=2**18)
    result = a_result(
        case, summary=a_summary(1e-3, 0.05), bus_factor=1.5, limit=Limit(4e9, "memcpy"),
        others_share=0.5,
    )  # fmt: skip
    (row,) = read_table(
        formats.table(a_run(result)), "all_reduce  float32  sum  in place  2 ranks  cpu"
    )
    assert row == {
        "size": "1 MiB", "count": "262144", "backend": "gloo", "time µs": "1000", "95 %": "±5.0%",
        "p99 µs": "3000", "skew µs": "15.62", "algbw GB/s": "1.049", "busbw GB/s": "1.573",
        "% limit": "39.3", "check": "ok", "flags": "imprecise busy",
    }  # fmt: skip
    (line,) = lines.lines(a_run(result))
    shown = [column for column in COLUMNS.values() if column.default and column.applies(line)]
    assert list(row) == [column.heading for column in shown]


def test_what_is_not_known_is_a_dash() -> None:
    """A missing interval, percentile, common clock, limit or check is a dash, never a 0."""
    summary = a_summary(1e-3, None, percentiles_seconds={}, skew_seconds=None)
    (row,) = read_table(formats.table(a_run(a_result(summary=summary, checks=0))), "all_reduce")
    dashed = {head for head, cell in row.items() if cell == "-"}
    assert dashed == {"95 %", "p99 µs", "skew µs", "% limit", "check"}


def test_the_faster_backend_has_a_star_and_sizes_stand_once() -> None:
    """Under one size the backends stand in order; the one whose interval lies below the other's
    has a star; size and count are not repeated; overlapping intervals have no star."""
    found = read_table(formats.table(two_backends()), "all_reduce")
    assert [(row["size"], row["count"], row["backend"]) for row in found] == [
        ("4 B", "1", "gloo"), ("", "", "mpi *"), ("1 MiB", "262144", "gloo"), ("", "", "mpi *"),
    ]  # fmt: skip
    run = two_backends()
    same = [replace(r, summary=r.summary and a_summary(1e-3, 0.5)) for r in run.results]
    assert "*" not in formats.table(replace(run, results=tuple(same)))


def test_a_skipped_case_has_no_row_and_a_reason(frozen: Frozen) -> None:
    """Sizes skipped for the same reason share a line, from the smallest to the largest."""
    run = two_backends()
    more = replace(run.results[-1].case, nbytes=2**31, count=2**29)
    text = formats.table(replace(run, results=(*run.results, replace(run.results[-1], case=more))))
    frozen.text("\n".join(line for line in text.splitlines() if line.startswith("skipped")))
    assert len(read_table(text, "all_reduce")) == 4


def test_what_is_not_the_same_stands_in_tables_of_its_own(frozen: Frozen) -> None:
    """Cases that differ in operation, form, dtype, reduce op, root, place or async get tables of
    their own, with these in the title."""
    plain = a_case()
    cases = [
        plain, replace(plain, form="list"), replace(plain, dtype="int8"),
        replace(plain, reduce_op="max"), replace(plain, in_place=False),
        replace(plain, async_op=True), replace(plain, operation="reduce", root=1),
        replace(plain, operation="barrier", nbytes=0, reduce_op=None, world_size=1),
    ]  # fmt: skip
    text = formats.table(a_run(*(a_result(case) for case in cases)))
    titles = [line for line in text.splitlines() if line.endswith("  cpu")]
    assert len(set(titles)) == len(titles) == len(cases)
    assert [len(read_table(text, title)) for title in titles] == [1] * len(cases)
    frozen.text("\n".join(titles))


@pytest.mark.parametrize("state", ["running", "interrupted", "failed", "complete"])
@pytest.mark.parametrize("form", ["table", "markdown"])
def test_a_partial_run_is_marked(form: str, state: str, frozen: Frozen) -> None:
    """A run that did not complete is marked PARTIAL with the reason, and its results are shown."""
    text = FORMATS[form](two_backends(state=state, state_reason="rank 1 died"), None, False)
    marks = [line for line in text.splitlines() if line.startswith("PARTIAL")]
    assert len(marks) == (state != "complete")
    frozen.text("\n".join(marks))
    assert "mpi *" in text


def test_a_partial_run_says_what_is_missing(frozen: Frozen) -> None:
    """A partial run states for each backend how many cases it has, or that it was not started."""
    run = a_run(
        a_result(),
        state="interrupted",
        state_reason="interrupted by a signal",
        backends=("gloo", "mpi"),
        launches=(a_launch(0, "gloo", cases=39),),
    )
    frozen.text("\n".join(x for x in formats.table(run).splitlines() if x.startswith("PARTIAL")))


def test_quiet_leaves_the_tables_only() -> None:
    """--quiet drops header, notes, skipped cases and legends, and keeps titles and rows."""
    run = two_backends(findings=(Finding("note", "x", "A note"),))
    blocks = formats.table(run, quiet=True).rstrip("\n").split("\n\n")
    assert len(blocks) == 1
    assert blocks[0].startswith("all_reduce ")
    assert blocks[0] in formats.table(run)


def test_a_run_without_results_says_so(frozen: Frozen) -> None:
    """A run without results is shown as such in every format, without an error."""
    run = a_run()
    frozen.text(formats.table(run))
    frozen.text(formats.markdown(run))
    assert pd.read_csv(io.StringIO(formats.csv(run))).shape == (0, len(COLUMNS))
    assert codec.decode(Run, json.loads(formats.json(run))) == run


def test_legends_explain_the_flags_that_were_raised_and_no_others() -> None:
    """The legend explains each raised flag, and no other; it names the limit and its source."""
    run = a_run(a_result(limit=Limit(2.5e9, "memcpy"), requested_nbytes=1))
    said = formats.table(run).splitlines()
    explained = [name for name in lines.FLAGS if any(line.startswith(f"{name}: ") for line in said)]
    assert explained == ["rounded"]
    (limit,) = [line for line in said if line.startswith("% limit ")]
    assert "2.500 GB/s" in limit
    assert "memcpy" in limit


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_the_chosen_columns_stand_in_their_order(form: str) -> None:
    """--columns shows exactly these columns in this order, in every format."""
    text = FORMATS[form](two_backends(), ("flags", "min", "size"), True)
    if form == "csv":
        assert text.splitlines()[0] == "flags,min,size"
    elif form == "json":
        assert [list(row) for row in json.loads(text)] == [["flags", "min", "size"]] * 4
    else:
        heads = next(line for line in text.splitlines() if "min µs" in line)
        assert re.findall(r"flags|min µs|size|time", heads) == ["flags", "min µs", "size"]


def test_every_column_can_be_shown_for_every_line() -> None:
    """Each column of each kind of line is a short text without line breaks, in the table and in
    CSV, also where nearly nothing is known."""
    bare = a_summary(1e-3, None, percentiles_seconds={}, lag1=None, skew_seconds=None,
                     last_in_seconds=None, global_seconds=None)  # fmt: skip
    barrier = a_case(operation="barrier", nbytes=0, count=0, reduce_op=None)
    run = a_run(a_result(), a_result(barrier, summary=bare, cold_seconds=None, checks=0))
    for line in lines.lines(run):
        for column in COLUMNS.values():
            assert re.fullmatch(r"[^\n]{0,40}", column.show(line))
            assert isinstance(column.value(line), float | int | str | None)
    assert len(formats.csv(run).splitlines()) == 3


def test_statistics_are_over_all_launches() -> None:
    """Over three launches, a row has the middle mean, the least minimum and the largest maximum."""
    results = [a_result(launch=n, summary=a_summary(s)) for n, s in enumerate((2e-3, 8e-3, 4e-3))]
    (line,) = lines.lines(a_run(*results))
    wanted = {"mean": 4500, "min": 1000, "max": 32_000, "rank_mean": 3000, "rank_min": 2000,
              "last_in": 3750, "global": 4250, "time": 4000, "skew": 62.5}  # fmt: skip
    assert {name: COLUMNS[name].value(line) for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345.6, "12346"), (1234.5, "1234"), (123.45, "123.5"), (12.345, "12.35"),
        (1.23456, "1.235"), (0.1234, "0.1234"), (0.01234, "0.0123"), (0.0012, "0.0012"),
        (0.000016, "0.000016"), (0, "0"), (0.0, "0"), (-1.5, "-1.500"), (None, "-"), ("x", "x"),
        (7, "7"), (123456789, "123456789"),
    ],
)  # fmt: skip
def test_numbers_keep_their_first_digits(value: float | str | None, text: str) -> None:
    """Numbers have four digits, two below 0.001, never an exponent; counts stay whole."""
    assert digits(value) == text


# --- for machines ---------------------------------------------------------------------------------


def test_csv_loads_with_numbers_as_numbers() -> None:
    """pandas reads one row a case, every column by name, numbers unrounded and numeric, empty where
    there is none; the case that was not measured stands last, with its reason."""
    run = two_backends()
    frame = pd.read_csv(io.StringIO(formats.csv(run)), float_precision="round_trip")
    assert list(frame.columns) == list(COLUMNS)
    assert frame["reason"].tolist()[4:] == ["no memory"]
    assert frame["reason"][:4].isna().all()
    frame = frame[:4]
    texts = {
        "op", "type", "redop", "form", "place", "group", "backend", "provider", "check", "flags",
        "reason",
    }  # fmt: skip
    for name in set(COLUMNS) - texts:
        assert pd.api.types.is_numeric_dtype(frame[name]), name
    measured = [line for line in lines.lines(run) if line.seconds is not None]
    assert frame["size"].tolist() == [4, 4, 2**20, 2**20]
    assert frame["time"].tolist() == [(line.seconds or 0) * 1e6 for line in measured]
    assert frame["busbw"].tolist() == [(line.busbw or 0) / 1e9 for line in measured]
    assert frame["interval"].tolist() == [line.half_width for line in measured]
    assert frame["root"].isna().all()
    assert frame["limit"].isna().all()


def test_json_is_the_whole_run() -> None:
    """JSON without columns is the run as stored; with columns its numbers are unrounded."""
    run = two_backends()
    assert codec.decode(Run, json.loads(formats.json(run))) == run
    chosen = json.loads(formats.json(run, ("backend", "time", "p99.9")))
    assert chosen[0] == {"backend": "gloo", "time": pytest.approx(200), "p99.9": None}
    assert len(chosen) == 4


def test_markdown_is_a_table_that_renders() -> None:
    """Every table has a heading, a blank line, a head, a rule and rows of equally many cells; text
    around it stands in paragraphs of its own."""
    text = formats.markdown(two_backends())
    all_lines = text.splitlines()
    start = next(i for i, line in enumerate(all_lines) if line.startswith("|"))
    assert all_lines[start - 2].startswith("### all_reduce  float32")
    assert all_lines[start - 1] == ""
    table = []
    for line in all_lines[start:]:
        if not line.startswith("|"):
            break
        table.append(line.strip("|").split("|"))
    assert len(table) == 2 + 4
    (line, *_) = lines.lines(two_backends())
    shown = [column for column in COLUMNS.values() if column.default and column.applies(line)]
    assert {len(row) for row in table} == {len(shown)}
    assert all(re.fullmatch(r":?-+:?", cell) for cell in table[1])
    assert [row[2].strip() for row in table[2:]] == ["gloo", "mpi *"] * 2
    assert all_lines[start + 6] == ""
    inside = [i for i, line in enumerate(all_lines) if line.startswith("|")]
    outside = [line for i, line in enumerate(all_lines) if i not in inside]
    paired = itertools.pairwise(outside)
    assert all(not (a and b) for a, b in paired), "two lines would run together in one paragraph"


# --- adding one -----------------------------------------------------------------------------------


def test_a_format_and_a_column_that_are_added_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An entry added to FORMATS or COLUMNS stands in the help, is accepted and is shown."""
    monkeypatch.setitem(FORMATS, "mine", lambda run, columns, quiet: f"{run.id}!")
    monkeypatch.setitem(COLUMNS, "double", Column("double", lambda line: 2 * line.case.nbytes))
    parser = options.Parser(prog="ddpbench collectives")
    collectives.add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    assert f"{{{','.join(FORMATS)}}}" in shown
    assert "markdown,mine}" in shown
    assert ", reason, double" in shown
    namespace = parser.parse_args(["--format", "mine", "--columns", "double"])
    run = two_backends()
    assert FORMATS[namespace.format](run, namespace.columns, False) == "a-run!"
    assert [r["double"] for r in read_table(formats.table(run), "all_reduce")] == [
        "8", "8", "2097152", "2097152",
    ]  # fmt: skip
    assert formats.csv(run, namespace.columns).split() == ["double", *["8"] * 2, *["2097152"] * 2]


@pytest.mark.parametrize(
    "hosts",
    [(1,), (4,), (2, 1, 1), (8, 8), (8,) * 40 + (4,)],
    ids=lambda hosts: f"{sum(hosts)} on {len(hosts)}",
)
def test_the_title_tells_where_the_ranks_are(hosts: tuple[int, ...], frozen: Frozen) -> None:
    """How many on each host, where there are several; the same count on other hosts is another
    table."""
    case = a_case(world_size=sum(hosts), ranks_per_host=hosts)
    frozen.text(format_ranks(case))
    other = a_case(world_size=sum(hosts), ranks_per_host=(*hosts, 0))
    text = formats.table(a_run(a_result(case), a_result(other)))
    assert f"  {format_ranks(case)}  cpu" in text
    assert len(re.findall(r"^all_reduce  float32", text, re.MULTILINE)) == 2


def test_a_stored_run_is_loaded_as_the_rows_of_its_csv(tmp_path: Path) -> None:
    """`ddpbench.load`: numbers are numbers, and a case that was not measured has a row."""
    run = two_backends()
    store.write(tmp_path, run)
    rows = ddpbench.load(tmp_path)
    expected = pd.read_csv(io.StringIO(FORMATS["csv"](run, None, False)))
    assert list(rows) == list(expected)
    assert rows["time"].dtype == float
    assert rows["time"].equals(expected["time"])
    assert list(rows["reason"].notna()) == [False] * 4 + [True]
