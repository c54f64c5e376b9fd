"""Read the text tables that ddpbench prints."""

from __future__ import annotations

import re


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
