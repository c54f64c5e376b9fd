"""The examinations of a doctor's run: its document, and charts of links and of stored tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ddpbench.present.charts.kinds import ROOMY, draw_pairs
from ddpbench.present.columns import Column, choose_columns, text_column
from ddpbench.present.document import (
    Chart,
    Document,
    ReportRun,
    Section,
    draw_chart,
    make_table,
    plain_name,
    show_rows,
)
from ddpbench.records.schema import Examination, Finding, Run
from ddpbench.records.wording import counted

FINDING_COLUMNS: dict[str, Column[Finding]] = {
    "severity": text_column("severity", lambda f: f.severity, "error, warning or note"),
    "code": text_column("code", lambda f: f.code, "name of the finding"),
    "sentence": text_column("sentence", lambda f: f.sentence, "the fact"),
    "next_step": text_column("next_step", lambda f: f.next_step, "what to do"),
    "place": text_column(
        "place",
        lambda f: " ".join(f"{k}={v}" for k, v in f.place.items()),
        "rank, host, link, … as name=value",
    ),
}


def build_document(run: Run, columns: tuple[str, ...] | None, quiet: bool) -> Document:
    """Return the document of a run.

    columns: show the findings as a table of these columns instead of sentences. quiet: leave out
    setup and examinations.
    """
    from ddpbench.present import header  # loads numpy

    partial = tuple(header.explain_partial(run))
    result = Section("result", "Result", state_verdict(run), partial, run.findings)
    if columns is not None:
        table = show_rows("", choose_columns(columns, FINDING_COLUMNS), run.findings)
        rows = ((Chart("findings", "Findings", "", table),),)
        result = replace(result, findings=(), rows=rows)
    if quiet:
        return Document("", (result,))
    sections = [header.build_setup(run, "Setup"), *build_sections(ReportRun(run.id, run))]
    return Document(header.format_title(run), (*sections, result))


def state_verdict(run: Run) -> str:
    """Return one line: the number of findings, or that there are none and what remains open."""
    counts = Counter(finding.severity for finding in run.findings)
    seconds = sum(examination.seconds for examination in run.examinations)
    where = f"{counted(len(run.examinations), 'examination')} in {seconds:.0f} s"
    bad = [counted(counts[name], name).upper() for name in ("error", "warning") if counts[name]]
    if bad:
        return f"{' AND '.join(bad)} in {where}"
    if run.state != "complete":
        return f"UNDECIDED: nothing found in {where}, but the run is not complete"
    open_questions = sum(len(examination.unchecked) for examination in run.examinations)
    if open_questions:
        questions = counted(open_questions, "question")
        return f'NOTHING FOUND in {where}; {questions} not answered (see "Not checked")'
    return f"HEALTHY: nothing found in {where}"


def build_sections(run: ReportRun, *, drawn: bool = False) -> Iterator[Section]:
    """Yield a section per examination: its lines, and its stored tables.

    drawn: whether links have charts above the tables. Of several launches, a table has the lines.
    """
    for name in dict.fromkeys(one.name for one in run.run.examinations):
        examined = _name_launches([one for one in run.run.examinations if one.name == name])
        origins: dict[str, list[str]] = {}
        for where, one in examined.items():
            for line in _list_lines(one):
                origins.setdefault(line, []).append(where)
        charts = [*_list_tables(name, examined)]
        if drawn and name == "links":
            charts = [*_draw_all_links(examined), *charts]
        rows = [tuple(charts[n : n + 2]) for n in range(0, len(charts), 2)]
        section = Section(plain_name(name), _capitalize(name), rows=tuple(rows))
        if len(examined) == 1:
            yield replace(section, lines=tuple(origins))
            continue
        cells = [("; ".join(wheres), line) for line, wheres in origins.items()]
        table = make_table("", ("launch", "result"), cells, left=("launch", "result"))
        results = Chart(f"{section.name}-results", "Results", "", table)
        yield replace(section, rows=(*rows, (results,)))


def _name_launches(same: list[Examination]) -> dict[str, Examination]:
    """Return examinations of one name by backend and launch: "mpi, launch 1"; "" for one alone."""
    backends = [one.backend for one in same]
    named = {}
    for one in same:
        backend = one.backend if len(set(backends)) > 1 else ""
        launch = f"launch {one.launch}" if len(set(backends)) < len(backends) else ""
        named[", ".join(filter(None, (backend, launch)))] = one
    return named


def _list_lines(examination: Examination) -> Iterator[str]:
    for line in examination.told:
        yield f"{_capitalize(line)}."
    for question in examination.unchecked:
        yield f"Not checked: {question}."


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list_tables(name: str, examined: Mapping[str, Examination]) -> Iterator[Chart]:
    """Yield each stored table; of facts, which have no headings, the first per backend."""
    seen: set[tuple[str, str]] = set()
    for number, (where, one) in enumerate(examined.items()):
        for table in one.tables:
            key = (one.backend, table.title)
            if key in seen and not any(column.heading for column in table.columns):
                continue
            seen.add(key)
            title = ", ".join(filter(None, (table.title, where)))
            chart = f"{plain_name(name)}-{number}-{plain_name(table.title)}"
            yield Chart(chart, _capitalize(title), "", replace(table, title=title))


# --- links ----------------------------------------------------------------------------------------


def _draw_all_links(examined: Mapping[str, Examination]) -> Iterator[Chart]:
    for number, (where, one) in enumerate(examined.items()):
        if one.figures.get("cells"):
            yield from draw_links(one.figures, f"-{number}" if number else "", where or one.backend)


def draw_links(figures: Mapping[str, Any], name: str, where: str) -> Iterator[Chart]:
    """Yield heat maps of bandwidth and latency between the ranks or hosts of one launch.

    name: ends the names of the charts. where: backend and launch.
    """
    kind, slow = figures["kind"].removesuffix("s"), _find_slow_ways(figures)
    labels = name_ends(figures)
    alone = all(cell[2] is not None for cell in figures["cells"])
    rates = [cell[3] if cell[2] is None else cell[2] for cell in figures["cells"]]
    scale, unit = (1e9, "GB/s") if min(rates) >= 1e9 else (1e6, "MB/s")
    bandwidth, latency = [], []
    for (sender, receiver, _, at_once, seconds), rate in zip(figures["cells"], rates, strict=True):
        ends = {"from": labels[sender], "to": labels[receiver]}
        mark = "slow" if (sender, receiver) in slow else ""
        cell = {**ends, "_value": _round(rate / scale), "_marked": mark}
        if alone and at_once is not None:
            cell["all pairs at once"] = f"{_round(at_once / scale):g} {unit}"
        bandwidth.append(cell)
        latency.append({**ends, "_value": _round(seconds * 1e6), "_marked": ""})
    caption = (
        f"Rate from each {kind} to each other one, in {unit}, "
        f"{'one pair at a time' if alone else 'all pairs at once'}; more is better."
        f"{' Outlined: slow in every measurement.' if slow else ''}"
    )
    drawing = draw_pairs(bandwidth, list(labels.values()), kind, unit)
    yield draw_chart(f"links-bandwidth{name}", f"Bandwidth, {where}", caption, drawing)
    caption = "Half a round trip of a small message, median, in µs; less is better."
    drawing = draw_pairs(latency, list(labels.values()), kind, "µs")
    yield draw_chart(f"links-latency{name}", f"Latency, {where}", caption, drawing)


def name_ends(figures: Mapping[str, Any]) -> dict[int, str]:
    """Return a short name per end: its host, its rank, or both if there is room."""
    hosts = {host for _, host in figures["ends"]}
    if figures["kind"] == "hosts" and len(hosts) == len(figures["ends"]):
        return dict(figures["ends"])
    if len(hosts) == 1 or len(figures["ends"]) > ROOMY:
        return {rank: str(rank) for rank, _ in figures["ends"]}
    return {rank: f"{rank} {host}" for rank, host in figures["ends"]}


def _find_slow_ways(figures: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return the pairs (sender, receiver) of all confirmed suspects."""
    hosts = dict(figures["ends"])
    ways: set[tuple[int, int]] = set()
    for again in figures.get("again", []):
        if not again["confirmed"]:
            continue
        ends = {side: set(again[side]) for side in ("one", "other")}
        if again["kind"] == "host":  # one of its ranks names a host
            named = {side: {hosts[end] for end in ranks} for side, ranks in ends.items()}
            ends = {s: {r for r, host in hosts.items() if host in named[s]} for s in named}
        for one in ends["one"]:
            for other in ends["other"] or set(hosts) - ends["one"]:
                ways |= {(one, other)} if again["ways"] != "receives" else set()
                ways |= {(other, one)} if again["ways"] != "sends" else set()
    return ways


def _round(value: float) -> float:
    """Return three digits, or all before the decimal point."""
    return float(f"{value:.3g}") if value < 1000 else float(round(value))
