"""Tables of a run of collectives: one per operation, then skipped cases and legends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpbench.analysis import fit, lines
from ddpbench.analysis.fit import Estimate, Fit, Segment
from ddpbench.analysis.lines import Line
from ddpbench.catalog.sizes import UNITS, readable
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import Column, choose_columns, digits, explain, title_parts
from ddpbench.present.document import Section, as_row, tabulate
from ddpbench.records.schema import Run


def build_sections(
    run: Run, wanted: tuple[str, ...] | None, *, fitted: bool = True
) -> Iterator[Section]:
    """Yield the tables, why cases were skipped, and the legend.

    wanted: columns. fitted: whether the fits of an ended run stand below its tables.
    """
    fitted = fitted and run.state in ("complete", "interrupted")
    known = lines.lines(run)
    shown = [line for line in known if line.seconds is not None]
    columns = choose_columns(wanted, COLUMNS, shown)
    tables, all_fits = [], []
    for title, group in _group_by_title(shown).items():
        fits = fit.fits(group) if fitted else []
        all_fits += fits
        rows = _rows(group, columns)
        tables.append(tabulate(title, columns, rows, map(_format_fit, fits)))
    legend = explain(shown, columns, lines.FLAGS)
    legend += _limits(shown) if COLUMNS["limit"] in columns else []
    if all_fits:
        over = " or ".join(dict.fromkeys(one.of for one in all_fits))
        legend.append(
            f"fit: time = α + βn for messages of n bytes, with 95 % intervals over {over}; 1/β: "
            "algbw of an endless message; n½: size at which α is half the time; figures that the "
            "times do not determine are left out"
        )
    yield Section("collectives", "", rows=tuple(map(as_row, tables)))
    yield Section("notes", "", lines=tuple(_skipped(known)))
    yield Section("legend", "", lines=tuple(legend))


def _format_fit(one: Fit) -> str:
    """Format latency and bandwidth of one backend: "fit gloo: 4 B to 4 MiB: α 4.900 µs (…), …"."""
    parts = []
    for segment in one.segments:
        figures = [
            f"α {format_estimate(segment.latency, 1e6, ' µs')}" if segment.latency else "",
            f"1/β {format_estimate(segment.rate, 1e-9, ' GB/s')}" if segment.rate else "",
            f"n½ {_format_half(segment.half)}" if segment.half else "",
        ]
        parts.append(f"{format_sizes(segment)}: {', '.join(filter(None, figures))}")
    return f"fit {one.case.backend}: {'; '.join(parts)}"


def format_sizes(segment: Segment) -> str:
    return f"{readable(segment.first)} to {readable(segment.last)}"


def format_estimate(estimate: Estimate, scale: float, unit: str = "") -> str:
    """Format a figure and its interval: "4.900 µs (4.700 to 5.200)"."""
    value, low, high = (digits(v * scale) for v in (estimate.value, estimate.low, estimate.high))
    return f"{value}{unit} ({low} to {high})"


def _format_half(half: Estimate) -> str:
    prefix, size = next((u, s) for u, s in reversed(UNITS.items()) if half.value >= s or s == 1)
    return format_estimate(half, 1 / size, f" {prefix}{'iB' if prefix else 'B'}")


def _group_by_title(shown: list[Line]) -> dict[str, list[Line]]:
    """Group lines under the title of their table, which states what its rows have in common."""
    groups: dict[str, list[Line]] = {}
    for line in shown:
        operation, form, *others = title_parts(line.case)
        parts = (operation, f"({form})" if form else "", *others)
        groups.setdefault("  ".join(filter(None, parts)), []).append(line)
    return groups


def _rows(group: list[Line], columns: Sequence[Column[Line]]) -> list[list[str]]:
    """Format the rows of a table; size and count stand only once for several backends."""
    rows, before = [], None
    for line in group:
        again = line.case.nbytes == before
        before = line.case.nbytes
        rows.append(
            ["" if again and c.name in ("size", "count") else c.show(line) for c in columns]
        )
    return rows


def _skipped(all_lines: list[Line]) -> list[str]:
    """Explain why cases have no row, the sizes of one reason together."""
    reasons: dict[tuple[str, str, str], list[int]] = {}
    for line in all_lines:
        if line.reason is not None:
            case = line.case
            name = " ".join(filter(None, (case.called, case.dtype, case.reduce_op)))
            reasons.setdefault((name, case.backend, line.reason), []).append(case.nbytes)
    return [
        f"skipped {name} on {backend}, {readable(sizes[0])}"
        + (f" … {readable(sizes[-1])}" if len(sizes) > 1 else "")
        + f": {reason}"
        for (name, backend, reason), sizes in reasons.items()
    ]


def _limits(shown: list[Line]) -> list[str]:
    """Name the rates that the column `limit` refers to: one line per backend, source, group."""
    rates: dict[tuple[str, str, str], list[float]] = {}
    operations: dict[tuple[str, str, str], dict[str, None]] = {}
    for line in shown:
        for limit in (result.limit for result in line.results):
            if limit is not None and line.fraction is not None:
                key = (line.case.backend, limit.source, line.case.group)
                rates.setdefault(key, []).append(limit.bytes_per_second / 1e9)
                operations.setdefault(key, {})[line.case.called] = None
    legend = []
    for key, values in rates.items():
        backend, source, _ = key
        low, high = digits(min(values)), digits(max(values))
        span = low if low == high else f"{low} … {high} (by size)"
        names = ", ".join(operations[key])
        legend.append(f"limit on {backend} of {names}: busbw as a share of {span} GB/s, {source}")
    # Where ddpbench has looked for limits, it has found the hard one.
    looked = (r for line in shown for r in line.results if r.hard_limit and r.case.nbytes)
    if any(result.limit is None and result.case.world_size > 1 for result in looked):
        legend.append("limit -: no rate of these links is known here; give one with --limit GB/S")
    return legend
