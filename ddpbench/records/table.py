"""A table of an examination, as a run stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TableColumn:
    """A column of a `Table`."""

    heading: str = ""  # with the unit of its numbers; a table without headings is a list of facts
    align: str = "right"  # or "left", for words
    decimals: int | None = None  # of its numbers; None: four digits


@dataclass(frozen=True)
class Table:
    """A table of an examination as data: it can be printed without the code that made it."""

    title: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[Any, ...], ...]  # a string, a number, or None for an unknown value
    legend: tuple[str, ...] = ()  # lines below the table
