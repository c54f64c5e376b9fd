"""Layout of tables and the text around them: on a terminal, or as Markdown."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ddpbench.render.column import Column

RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Style:
    tablefmt: str  # of tabulate
    heading: str  # before a title
    gap: str  # between lines that must not run together

    def block(self, title: str, body: str, level: int = 0) -> str:
        """Put text under a title; a higher level is a title within."""
        mark = self.heading and "#" * level + self.heading
        return f"{mark}{title}\n{self.gap[1:]}{body}"

    def table(
        self, cells: Sequence[Sequence[str]], headings: Sequence[str], left: Container[str] = ()
    ) -> str:
        """Lay out cells under headings; columns whose heading is in `left` are aligned left."""
        from tabulate import tabulate

        if self is MARKDOWN:
            cells = [[cell.replace("|", "\\|") for cell in row] for row in cells]
        align = ["left" if heading in left else "right" for heading in headings]
        return tabulate(
            cells, headings, tablefmt=self.tablefmt, colalign=align, disable_numparse=True
        )

    def columns(self, cells: Sequence[Sequence[str]], columns: Sequence[Column[Any]]) -> str:
        """Lay out cells under the headings of these columns, with their alignment."""
        left = {column.heading for column in columns if column.left}
        return self.table(cells, [column.heading for column in columns], left)

    def rows(
        self, rows: Iterable[RowT], columns: Sequence[Column[RowT]], *, drop_empty: bool = False
    ) -> str:
        """Lay out one table row per item; drop_empty leaves out columns without any text."""
        cells = [[column.show(row) for column in columns] for row in rows]
        kept = [i for i in range(len(columns)) if not drop_empty or any(row[i] for row in cells)]
        return self.columns([[row[i] for i in kept] for row in cells], [columns[i] for i in kept])


TERMINAL = Style("simple", "", "\n")
MARKDOWN = Style("github", "### ", "\n\n")
