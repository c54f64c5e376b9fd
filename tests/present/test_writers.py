"""Writers: each shows a document that it knows nothing about."""

from __future__ import annotations

import json

import pytest
from stored_runs import a_result, a_run

from ddpbench.present import formats
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


@pytest.mark.parametrize(("remarkable", "shown", "folded"), [(1, 1, 1), (0, 0, 2), (None, 2, 0)])
def test_markdown_folds_what_is_unremarkable(
    remarkable: int | None, shown: int, folded: int
) -> None:
    """The builder says how many rows are remarkable; a short table is shown."""
    chart = Chart("c", "", "", SPEEDS, remarkable=remarkable)
    text = WRITERS["markdown"](Document("", (Section("s", "S", rows=((chart,),)),)))
    before, _, after = text.partition("<details>")
    assert (before.count(" 512.0 |") + before.count(" - |"), bool(after)) == (shown, bool(folded))
    assert after.count(" 512.0 |") + after.count(" - |") == folded


def test_a_format_is_added_by_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows any document; so does `ddpbench show`."""

    def write(document: Document) -> str:
        return " ".join(chart.table.title for s in document.sections for chart in s.charts)

    monkeypatch.setitem(WRITERS, "titles", write)
    assert WRITERS["titles"](DOCUMENT) == " speeds"
    assert formats.show("titles", a_run(a_result())).endswith("cpu")


def test_machines_read_the_values() -> None:
    """CSV has them unrounded, an unknown one empty; JSON is what the builder gives."""
    assert WRITERS["csv"](DOCUMENT) == "disk,MB/s\na|<b>\\x1b[31m\\n,512.0\nb,\n"
    assert json.loads(WRITERS["json"](DOCUMENT)) == {"speed": 512.0}
