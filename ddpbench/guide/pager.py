"""Show Markdown in a pager. Loads rich: import this module only when stdout is a terminal."""

from __future__ import annotations

import os
import re
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown, MarkdownElement
from rich.text import Text


class Code(CodeBlock):
    """A code block that keeps its lines whole: a table with broken lines cannot be read."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render lines that are longer than the terminal unchanged; the pager scrolls sideways."""
        code = str(self.text).rstrip()
        longest = max(map(len, code.splitlines()), default=0)
        nested = options.max_width < console.width  # in a list, rich would cut the lines
        if nested or longest + 2 <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield Text(code, no_wrap=True, overflow="ignore")


class Chapter(Markdown):
    """Markdown whose code blocks are `Code`."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "fence": Code}


def page(text: str) -> None:
    """Show a chapter in the user's pager, wrapped to the terminal."""
    # For less: colors, no paging of a short text, keep the screen, cut long lines.
    os.environ.setdefault("LESS", "-FRXS")
    console = Console()
    with console.pager(styles=True):
        chapter = Chapter(_unlink(text), code_theme="ansi_dark", hyperlinks=False)
        console.print(chapter, crop=False)


def _unlink(text: str) -> str:
    """Return the text with links to chapters in bold: a terminal cannot follow them."""
    return re.sub(r"\[([^]]+)\]\(\w+\.md(#[^)]*)?\)", r"**\1**", text)
