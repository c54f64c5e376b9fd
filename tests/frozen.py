"""Facts and texts that are frozen in tests/golden/.

golden/facts/NAME.json  what is true whatever the wording. No command writes it: see CHANGES.md.
golden/text/NAME.txt    texts as ddpbench prints them. `pytest --rewrite-text` writes them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ddpbench.records.schema import Finding

GOLDEN = Path(__file__).parent / "golden"
# Module and name of each test, and whether it has the marker measures_time.
COLLECTED = pytest.StashKey[dict[tuple[str, str], bool]]()
HEAD = "═══ "  # a line that starts with this begins a text and contains its key

RANKS = re.compile(r"\branks? (\d+(?:(?:, | and |–)\d+)*)")
CALLS = re.compile(r"#\d+ \w+")
PLACES = re.compile(r"[\w-]+\.py:\d+")


def finding_facts(finding: Finding) -> list[Any]:
    """Return the facts of a finding whatever its wording: severity, code and place."""
    return [finding.severity, finding.code, finding.place]


def verdict_facts(verdict: str) -> dict[str, Any]:
    """Return the facts in the verdict on a hang: the first rank, all ranks, calls, places."""
    ranks: list[int] = []
    for numbers in RANKS.findall(verdict):
        for first, last in re.findall(r"(\d+)(?:–(\d+))?", numbers):
            ranks += range(int(first), int(last or first) + 1)
    return {
        "blamed": ranks[0] if ranks else None,
        "ranks": sorted(set(ranks)),
        "calls": sorted(set(CALLS.findall(verdict))),
        "places": sorted(set(PLACES.findall(verdict))),
    }


class Frozen:
    """The facts and texts frozen under one name: a test module or a command."""

    def __init__(self, name: str, key: str, rewrite: bool = False) -> None:
        self._facts = GOLDEN / "facts" / f"{name}.json"
        self._text = GOLDEN / "text" / f"{name}.txt"
        self._key, self._rewrite = key, rewrite
        self._calls = {"facts": 0, "text": 0}

    def facts(self, facts: Any) -> None:
        """Assert that these facts are the frozen ones."""
        observed, key = normalise(facts), self._next_key("facts")
        assert observed == read_facts(self._facts).get(key), f"{self._facts.name}: {key}"

    def text(self, text: str) -> None:
        """Assert that this text is the frozen one, or write it with --rewrite-text."""
        key, texts = self._next_key("text"), read_texts(self._text)
        if self._rewrite:
            write_texts(self._text, {**texts, key: text.strip("\n")})
        else:
            assert text.strip("\n") == texts.get(key), f"{self._text.name}: {key}"

    def findings(self, findings: Iterable[Finding]) -> None:
        """Assert severity, code and place of findings as facts, and their sentences as text."""
        findings = list(findings)
        self.facts([finding_facts(finding) for finding in findings])
        self.text("\n".join(f"{f.sentence}\n    Next: {f.next_step}" for f in findings))

    def verdict(self, verdict: str) -> None:
        """Assert ranks, calls and places of a hang's verdict as facts, and its sentence as text."""
        self.facts(verdict_facts(verdict))
        self.text(verdict)

    def _next_key(self, kind: str) -> str:
        self._calls[kind] += 1
        number = self._calls[kind]
        return self._key if number == 1 else f"{self._key} {number}"


def normalise(facts: Any) -> Any:
    """Return facts as in JSON, with 9 digits of floats: machines differ in the last ones."""
    if isinstance(facts, float):
        return float(f"{facts:.9g}")
    if isinstance(facts, dict):
        return {str(key): normalise(value) for key, value in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [normalise(value) for value in facts]
    return facts


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a file by their keys."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def read_texts(path: Path) -> dict[str, str]:
    """Return the texts of a file by their keys."""
    blocks = f"\n{path.read_text()}".split(f"\n{HEAD}")[1:] if path.exists() else []
    pairs = (block.partition("\n") for block in blocks)
    return {key: text.strip("\n") for key, _, text in pairs}


def write_texts(path: Path, texts: dict[str, str]) -> None:
    """Write the texts of a file, sorted by their keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(f"{HEAD}{key}\n{texts[key]}\n" for key in sorted(texts)))
