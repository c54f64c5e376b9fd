"""The rate that links surely carry. It needs no numpy, because a help text loads its users."""

from __future__ import annotations

import math
from collections.abc import Iterable


def upper_quartile(rates: Iterable[float]) -> float:
    """Return the upper quartile, one of the values: of two or three the largest.

    Other load makes a link slower, never faster, so the higher rates are those of the link.
    """
    ordered = sorted(rates)
    return ordered[math.ceil(0.75 * len(ordered)) - 1]
