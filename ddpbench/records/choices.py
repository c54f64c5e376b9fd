"""Sentences about a word that is none of those allowed."""

from __future__ import annotations

from collections.abc import Iterable

MOST_LISTED = 40  # names in one sentence; of more, the help has the list


def explain_unknown(kind: str, word: str, known: Iterable[str]) -> str:
    """Return "unknown KIND 'WORD': choose a, b or c. Did you mean b?"."""
    table = list(known)
    choices = f": choose {list_choices(table)}" if len(table) <= MOST_LISTED else ""
    return f"unknown {kind} {word!r}{choices}{did_you_mean(word, table)}"


def list_choices(known: Iterable[str]) -> str:
    """Return "a, b or c"."""
    *most, last = known
    return f"{', '.join(most)} or {last}" if most else str(last)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ". Did you mean NAME?" for the closest name; "" if no name is close."""
    import difflib

    closest = difflib.get_close_matches(word, list(known), 1)
    return f". Did you mean {closest[0]}?" if closest else ""
