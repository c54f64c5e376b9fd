"""A run as text: the content of each format, and machine formats that machines can read."""

import io
import itertools
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from frozen import Frozen
from stored_runs import a_case, a_result, a_run, a_summary
from stored_steps import (
    a_step_case,
    a_step_result,
    a_step_run,
    a_step_summary,
    some_replicas,
)

import ddpbench
from ddpbench.analysis import lines, step_lines
from ddpbench.present import formats
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import format_number
from ddpbench.present.steps.columns import STEP_COLUMNS, format_ms
from ddpbench.present.writers import WRITERS
from ddpbench.records import codec, store
from ddpbench.records.schema import Run


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


def read_table(text: str, title: str) -> list[dict[str, str]]:
    """Return the rows of the table under a title, as dictionaries by column head."""
    below = text.split("\n" + title, 1)[1].split("\n", 1)[1]
    heads, rule, *body = below.split("\n\n", 1)[0].splitlines()
    spans = [match.span() for match in re.finditer("-+", rule)]
    spans[-1] = (spans[-1][0], 10_000)
    assert set(rule) == {"-", " "}
    return [
        {heads[slice(*span)].strip(): row[slice(*span)].strip() for span in spans} for row in body
    ]


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

    run, table = swept(saw=False), partial(formats.show, "table")
    frozen.text("\n".join(line for line in table(run).splitlines() if line.startswith("fit")))
    assert "fit gloo" in table(replace(run, state="interrupted"))
    assert "fit" not in table(replace(run, state="running"))
    assert "fit" not in table(run, quiet=True)
    assert "fit" not in table(swept(saw=True))


def test_what_is_not_known_is_a_dash() -> None:
    """A missing interval, percentile, common clock, limit or check is a dash, never a 0."""
    summary = a_summary(1e-3, None, percentiles_seconds={}, skew_seconds=None)
    (row,) = read_table(
        formats.show("table", a_run(a_result(summary=summary, checks=0))), "all_reduce"
    )
    dashed = {head for head, cell in row.items() if cell == "-"}
    assert dashed == {"interval ±", "limit %", "check"}
    column, line = COLUMNS["p99"], lines.lines(a_run(a_result(summary=summary)))[0]
    assert column.show(line) == COLUMNS["skew"].show(line) == "-"


def test_how_many_times_faster_stands_at_the_fastest_and_sizes_stand_once() -> None:
    """Under one size the backends stand in the order of --backend; the one whose interval lies
    below the other's says how many times faster it is; without any there is no such column."""
    found = read_table(formats.show("table", two_backends()), "all_reduce")
    assert [(row["size"], row["backend"], bool(row["faster ×"])) for row in found] == [
        ("4 B", "gloo", False), ("", "mpi", True), ("1 MiB", "gloo", False), ("", "mpi", True),
    ]  # fmt: skip
    assert max(map(len, formats.show("table", two_backends(), quiet=True).splitlines())) <= 100
    run = two_backends()
    same = [replace(r, summary=r.summary and a_summary(1e-3, 0.5)) for r in run.results]
    assert "faster" not in formats.show("table", replace(run, results=tuple(same)))


# --- columns --------------------------------------------------------------------------------------


def list_bare_lines() -> list[Any]:
    """Return lines of collectives and of steps, also with nearly nothing known."""
    bare = a_summary(1e-3, None, percentiles_seconds={}, skew_seconds=None,
                     last_in_seconds=None, global_seconds=None)  # fmt: skip
    barrier = a_case(operation="barrier", nbytes=0, count=0, reduce_op=None)
    run = a_run(a_result(), a_result(barrier, summary=bare, cold_seconds=None, checks=0))
    step = replace(a_step_summary(rounds=1), budget=(), buckets=())
    differ = some_replicas(equal=False, ok=False, verified=7, last_step=7, first_bad=7, cost=None)
    steps = [
        a_step_result(),
        a_step_result(a_step_case(batch=1), summary=step, replicas=None, cold_seconds=None),
        replace(a_step_result(a_step_case(batch=2), replicas=differ), summary=None),
    ]
    return [
        *((line, COLUMNS) for line in lines.lines(run)),
        *((line, STEP_COLUMNS) for line in step_lines.lines(a_step_run(*steps))),
    ]


def test_every_column_can_be_shown_for_every_line() -> None:
    """Each column is a short text without line breaks, in the table and in CSV."""
    for line, columns in list_bare_lines():
        for name, column in columns.items():
            assert re.fullmatch(r"[^\n]{0,40}", column.show(line)), name
            assert isinstance(column.value(line), float | int | str | None), name


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
        (12345.6, "12346"), (123.45, "123.5"), (1.23456, "1.235"), (0.01234, "0.0123"),
        (0.000016, "0.000016"), (0.0, "0"), (-1.5, "-1.500"), (None, "-"), ("x", "x"),
        (123456789, "123456789"),
    ],
)  # fmt: skip
def test_numbers_keep_their_first_digits(value: float | str | None, text: str) -> None:
    """Numbers have four digits, two below 0.001, never an exponent; counts stay whole."""
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "like", "text"),
    [
        (0.0012, 0.08, "1.20"), (0.012, 0.8, "12.0"), (1.5, 12.0, "1500"), (None, 1.0, "-"),
        (0.001, None, "1.000"), (0.0000012, 0.0000012, "0.0012"),
    ],
)  # fmt: skip
def test_milliseconds_have_the_places_of_the_step(
    seconds: float | None, like: float | None, text: str
) -> None:
    """A step has four digits, and its parts have as many decimal places."""
    assert format_ms(seconds, like) == text


# --- for machines ---------------------------------------------------------------------------------


def test_csv_loads_with_numbers_as_numbers() -> None:
    """pandas reads one row a case, every column by name, numbers unrounded and numeric, empty where
    there is none; the case that was not measured stands last, with its reason."""
    run = two_backends()
    frame = pd.read_csv(io.StringIO(formats.show("csv", run)), float_precision="round_trip")
    assert list(frame.columns) == list(COLUMNS)
    assert frame["reason"].tolist()[4:] == ["no memory"]
    assert frame["reason"][:4].isna().all()
    frame = frame[:4]
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
    assert codec.decode(Run, json.loads(formats.show("json", run))) == run
    chosen = json.loads(formats.show("json", run, ("backend", "time", "p99.9")))
    assert chosen[0] == {"backend": "gloo", "time": pytest.approx(200), "p99.9": None}
    assert len(chosen) == 4


@pytest.mark.parametrize("form", WRITERS)
def test_the_chosen_columns_stand_in_their_order(form: str) -> None:
    """--columns gives these columns in every format, and no other table; what is noise stays a
    bound in text."""
    slow = a_step_result(summary=a_step_summary(noise=0.02))
    fast = a_step_result(a_step_case(backend="mpi"), 1, a_step_summary(copies=0.05, noise=0.02))
    run = a_step_run(slow, fast)
    text = formats.show(form, run, ("copies", "backend"), True)
    if form == "csv":
        assert text.splitlines()[0] == "copies,backend"
    elif form == "json":
        assert [list(row) for row in json.loads(text)] == [["copies", "backend"]] * 2
    else:
        assert len(text.split("\n\n")) == (1 if form == "table" else 2)
        assert re.search(r"\(0\.\d\d\).*mpi", text)


def test_a_stored_run_is_loaded_as_the_rows_of_its_csv(tmp_path: Path) -> None:
    """`ddpbench.load`: numbers are numbers, and a case that was not measured has a row."""
    run = two_backends()
    store.write(tmp_path, run)
    rows = ddpbench.load(tmp_path)
    expected = pd.read_csv(io.StringIO(formats.show("csv", run)))
    assert list(rows) == list(expected)
    assert rows["time"].dtype == float
    assert rows["time"].equals(expected["time"])
    assert list(rows["reason"].notna()) == [False] * 4 + [True]
