"""The text of a doctor's run: the verdict, then each examination with its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ddpbench.analysis.setup import counted
from ddpbench.records.schema import Examination, Finding, Run
from ddpbench.render.column import Column, choose_columns, text_column
from ddpbench.render.style import Style

FINDING_COLUMNS: dict[str, Column[Finding]] = {
    "severity": text_column("severity", lambda f: f.severity),
    "code": text_column("code", lambda f: f.code),
    "sentence": text_column("sentence", lambda f: f.sentence),
    "next_step": text_column("next step", lambda f: f.next_step),
    "place": text_column("place", lambda f: " ".join(f"{k}={v}" for k, v in f.place.items())),
}

# What an examination shows besides what it told: name → (examination, style) → blocks of text.
TABLES: dict[str, Callable[[Examination, Style], list[str]]] = {
    "preflight": preflight.blocks,
    "stragglers": stragglers.blocks,
    "links": links.blocks,
    "capabilities": capabilities.blocks,
}


def blocks(run: Run, columns: tuple[str, ...] | None, quiet: bool, style: Style) -> list[str]:
    """Unless quiet, a block or more for each examination; at the end, where a terminal stops, the
    findings, as sentences or with these columns, and the verdict in one line."""
    from ddpbench.render import header  # loads numpy

    shown = []
    for each in run.examinations if not quiet else ():
        lines = [*each.told, *(f"not checked: {sentence}" for sentence in each.unchecked)]
        title = f"{each.name}  {each.backend}, {each.seconds:.1f} s"
        shown.append(style.block(title, style.gap.join(lines)))
        shown += TABLES[each.name](each, style)
    found = header.partial(run) + (header.finding_lines(run) if columns is None else [])
    if found:
        shown.append(style.gap.join(found))
    if columns is not None:
        names = choose_columns(columns, FINDING_COLUMNS)
        shown.append(style.rows(run.findings, [FINDING_COLUMNS[name] for name in names]))
    return [*shown, verdict(run)]


def verdict(run: Run) -> str:
    """One line: whether anything worse than a note was found."""
    counts = Counter(finding.severity for finding in run.findings)
    seconds = sum(each.seconds for each in run.examinations)
    looked = f"{counted(len(run.examinations), 'examination')} in {seconds:.0f} s"
    told = [counted(counts[name], name).upper() for name in ("error", "warning") if counts[name]]
    if told:
        return f"{' AND '.join(told)} in {looked}"
    if run.state != "complete":
        return f"UNDECIDED: nothing found in {looked}, which is not all"
    return f"HEALTHY: nothing found in {looked}"
