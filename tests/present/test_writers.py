"""Writers: each shows a document that it knows nothing about."""

from __future__ import annotations

import json

import pytest

from ddpbench.present.document import Chart, Document, Section, make_table
from ddpbench.present.writers import WRITERS
from ddpbench.records.schema import Finding

HOSTILE = "a|<b>\x1b[31m\n"
FINDING = Finding("error", "slow-disk", "the disk is slow", "buy another")
SPEEDS = make_table("speeds", ("disk", "MB/s"), [(HOSTILE, 512.0), ("b", None)], ("disk",))
FACTS = make_table("", ("", ""), [("cpu", "X"), ("memory", True)], ("",))
CHARTS = tuple(Chart(f"c{n}", "Speeds", "", table) for n, table in enumerate((FACTS, SPEEDS)))
SECTION = Section("disks", "Disks", "One disk is slow.", ("Wrote.",), (FINDING,), (CHARTS,))
DOCUMENT = Document("title", (SECTION,), SPEEDS, {"speed": 512.0})


def test_a_terminal_ends_with_what_matters_most() -> None:
    """The title of a section stands on its first lines; its result comes last."""
    *start, speeds, finding, result = WRITERS["table"](DOCUMENT).split("\n\n")
    assert start == ["title", "Disks\nWrote.", "cpu     X\nmemory  yes"]
    assert [line.split() for line in speeds.splitlines()[1::2]] == [
        ["disk", "MB/s"],
        [r"a|<b>\x1b[31m\n", "512.0"],
    ]
    assert finding == "ERROR (slow-disk): the disk is slow. Next: buy another"
    assert result == "One disk is slow.\n"


def test_markdown_begins_with_what_matters_most() -> None:
    """Facts are fenced; no cell ends a column, a row or the table."""
    text = WRITERS["markdown"](DOCUMENT)
    assert text.startswith(
        "# title\n\n## Disks\n\nOne disk is slow.\n\nWrote.\n\n- **ERROR** (slow"
    )
    assert "```\ncpu     X\nmemory  yes\n```" in text
    assert r"| a\|&lt;b&gt;\x1b[31m\n |" in text


@pytest.mark.parametrize(("name", "rows", "folded"), [("c", 13, 13), ("c", 12, 0), ("", 13, 0)])
def test_markdown_folds_long_tables_that_have_a_name(name: str, rows: int, folded: int) -> None:
    """The tables of `show` have none."""
    table = make_table("", ("disk", "MB/s"), [("a", 512.0)] * rows, ("disk",))
    section = Section("s", "S", rows=((Chart(name, "", "", table),),))
    before, _, after = WRITERS["markdown"](Document("", (section,))).partition("<details>")
    assert (before + after).count(" 512.0 |") == rows
    assert after.count(" 512.0 |") == folded


def test_machines_read_the_values() -> None:
    """CSV has them unrounded, counts whole, an unknown one empty; JSON is the builder's data."""
    counts = make_table("", ("n",), [(1,), (None,)])
    assert WRITERS["csv"](Document("", (), counts)) == 'n\n1\n""\n'
    assert WRITERS["csv"](DOCUMENT) == "disk,MB/s\na|<b>\\x1b[31m\\n,512.0\nb,\n"
    assert json.loads(WRITERS["json"](DOCUMENT)) == {"speed": 512.0}
