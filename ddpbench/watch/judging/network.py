"""Which links between hosts are slow. No torch.

A link's rate is taken while data was on its way, so a link that waits for a slow rank is not slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ddpbench.records.schema import Finding
from ddpbench.watch.history import Carried, History

SLOW = 0.5  # of the other links' median rate
LEAST_NBYTES, LEAST_BUSY_SECONDS = 1 << 20, 0.2  # that a link must have carried to be judged

Pair = tuple[str, str]


def judge_links(history: History) -> Iterator[Finding]:
    """Report each slow link, or a host whose links to several others are all slow."""
    rates = {
        pair: link.nbytes / link.busy_seconds
        for pair, link in history.links.items()
        if link.nbytes >= LEAST_NBYTES and link.busy_seconds >= LEAST_BUSY_SECONDS
    }
    if len(rates) < 3:
        return
    usual = float(np.median(list(rates.values())))
    slow = {pair: rate for pair, rate in rates.items() if rate < SLOW * usual}
    for host in {host for pair in slow for host in pair}:
        mine = [pair for pair in rates if host in pair]
        peers = {peer for pair in mine for peer in pair} - {host}
        if len(peers) > 1 and all(pair in slow for pair in mine):
            rate = float(np.median([slow.pop(pair) for pair in mine]))
            yield _finding(f"the links of {host} carry", rate, usual, {"host": host})
    for pair, rate in _merge(slow).items():
        link = history.links[pair]
        who = f"the link from {pair[0]} to {pair[1]} ({link.interface}) carries"
        yield _finding(who, rate, usual, {"host": pair[0], "peer": pair[1]}, link)


def _merge(slow: Mapping[Pair, float]) -> dict[Pair, float]:
    """Keep the slower direction of links that are slow in both."""
    return {
        pair: rate
        for pair, rate in slow.items()
        if (slow.get(pair[::-1], rate), pair[::-1]) >= (rate, pair)
    }


def _finding(
    who: str, rate: float, usual: float, place: dict[str, str], link: Carried | None = None
) -> Finding:
    resent = f"; it resent {link.retransmitted:.0f} segments" if link and link.retransmitted else ""
    return Finding(
        "warning",
        "slow-link",
        f"{who} {rate * 8e-6:.4g} Mbit/s while busy, the median link {usual * 8e-6:.4g} "
        f"Mbit/s{resent}",
        "measure every pair of hosts: torchrun … -m ddpbench.doctor --only links --by host",
        {**place, "bytes_per_second": rate, "usual_bytes_per_second": usual},
    )
