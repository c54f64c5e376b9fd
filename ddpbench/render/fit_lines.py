"""Lines below a table of collectives: latency and bandwidth of each backend."""

from __future__ import annotations

from collections.abc import Sequence

from ddpbench.analysis import fit
from ddpbench.analysis.fit import Estimate, Fit, Segment
from ddpbench.analysis.lines import Line
from ddpbench.catalog.sizes import UNITS, readable
from ddpbench.render.column import digits


def valid_fits(lines: Sequence[Line]) -> list[Fit]:
    """Return the fits of a table's rows that may be shown."""
    return [one for one in fit.fits(lines) if one.valid]


def format_fit(one: Fit) -> str:
    """Format the fit of one backend, over the sizes that a line describes."""
    return f"fit {one.case.backend}: {'; '.join(map(format_segment, one.valid))}"


def legend(fits: Sequence[Fit]) -> list[str]:
    """Explain the lines of these fits, and what their intervals are over."""
    if not fits:
        return []
    over = " or ".join(dict.fromkeys(one.of for one in fits))
    return [
        f"fit: time = α + βn for messages of n bytes, with 95 % intervals over {over}; 1/β: algbw "
        "of an endless message; n½: size at which α is half the time; figures that the times do "
        "not determine are left out"
    ]


def format_segment(segment: Segment) -> str:
    """Format a segment: "4 B to 4 MiB: α 4.900 µs (4.700 to 5.200), 1/β …, n½ …"."""
    figures = [
        f"α {format_estimate(segment.latency, 1e6, ' µs')}" if segment.latency else "",
        f"1/β {format_estimate(segment.rate, 1e-9, ' GB/s')}" if segment.rate else "",
        f"n½ {format_half(segment.half)}" if segment.half else "",
    ]
    return f"{format_sizes(segment)}: {', '.join(filter(None, figures))}"


def format_sizes(segment: Segment) -> str:
    """Format the sizes of a segment: "4 B to 4 MiB"."""
    return f"{readable(segment.first)} to {readable(segment.last)}"


def format_estimate(estimate: Estimate, scale: float, unit: str = "") -> str:
    """Format a figure and its interval: "4.900 µs (4.700 to 5.200)"."""
    value, low, high = (digits(v * scale) for v in (estimate.value, estimate.low, estimate.high))
    return f"{value}{unit} ({low} to {high})"


def format_half(half: Estimate) -> str:
    """Format n½ and its interval: "29.30 KiB (27.00 to 31.00)"."""
    prefix, size = next((u, s) for u, s in reversed(UNITS.items()) if half.value >= s or s == 1)
    return format_estimate(half, 1 / size, f" {prefix}{'iB' if prefix else 'B'}")


def explain_missing(one: Fit) -> list[tuple[str, str]]:
    """Return the sizes for which a fit has no line, each with the reason."""
    missing = []
    for segment in one.segments:
        if segment.miss:
            nbytes, factor = segment.miss
            why = f"at {readable(nbytes)} the time is {factor:.2g} × that of the best line"
            missing.append((format_sizes(segment), why))
        elif not segment.valid:
            missing.append((format_sizes(segment), "the launches differ too much"))
    return missing
