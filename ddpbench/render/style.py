"""Layout of tables and the text around them: on a terminal, or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Style:
    """One look."""

    tablefmt: str  # of tabulate
    heading: str  # before a title
    gap: str  # between lines that must not run together

    def block(self, title: str, body: str, level: int = 0) -> str:
        """Put text under a title; a higher level is a title within."""
        mark = self.heading and "#" * level + self.heading
        return f"{mark}{title}\n{self.gap[1:]}{body}"

    def table(
        self,
        cells: Sequence[Sequence[str]],
        heads: Sequence[str],
        align: Sequence[str] | None = None,
    ) -> str:
        """Format a table.

        align: "left" or "right" for each column; None: left for the columns of WORDS.
        """
        from tabulate import tabulate

        align = align or ["left" if head in WORDS else "right" for head in heads]
        return tabulate(cells, heads, tablefmt=self.tablefmt, colalign=align, disable_numparse=True)


TERMINAL = Style("simple", "", "\n")
MARKDOWN = Style("github", "### ", "\n\n")
