"""How tables and the text around them look: on a terminal, or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WORDS = (
    "backend", "flags", "check", "part of a step", "parameters", "replicas",
    "case", "test", "saved in", "verdict", "why", "date", "run", "of the longest", "changed to",
    "operation", "reduce op",
    "fault", "planted", "found", "named", "said",
    "severity", "code", "sentence", "next step", "place",
)  # fmt: skip


@dataclass(frozen=True)
class Style:
    """One look."""

    tablefmt: str  # of tabulate
    heading: str  # before a title
    gap: str  # between lines that must not run together

    def block(self, title: str, body: str, level: int = 0) -> str:
        """Text under a title; a higher level is a title within."""
        mark = self.heading and "#" * level + self.heading
        return f"{mark}{title}\n{self.gap[1:]}{body}"

    def table(self, cells: Sequence[Sequence[str]], heads: Sequence[str]) -> str:
        """A table; its columns stand on the right, those of words on the left."""
        from tabulate import tabulate

        align = ["left" if head in WORDS else "right" for head in heads]
        return tabulate(cells, heads, tablefmt=self.tablefmt, colalign=align, disable_numparse=True)


TERMINAL = Style("simple", "", "\n")
MARKDOWN = Style("github", "### ", "\n\n")
