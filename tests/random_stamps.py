"""Random time stamps of ranks, as an array [rank, repetition, (entry, exit, device)] in ns."""

from __future__ import annotations

import numpy as np

from ddpbench.analysis.stats import Kept, Stamps


def random_stamps(world: int, count: int, seed: int, device: bool = False) -> Stamps:
    """Random entries within 1 ms and durations of 1 to 3 ms, on a clock that began long ago."""
    draw = np.random.default_rng(seed)
    began = 10**12 + 10**7 * np.arange(count) + draw.integers(0, 10**6, (world, count))
    ended = began + draw.integers(10**6, 3 * 10**6, (world, count))
    on_device = draw.integers(0, 10**6, (world, count)) if device else np.full((world, count), -1)
    return np.stack([began, ended, on_device], axis=2)


def stamps_on_one_clock(world: int, count: int, seed: int = 1) -> Stamps:
    """Entries within 0.1 ms of each other, durations of 1 to 2 ms, the clock going on."""
    draw = np.random.default_rng(seed)
    entry = draw.integers(0, 10**5, (world, count)) + np.arange(count) * 10**7
    exits = entry + draw.integers(10**6, 2 * 10**6, (world, count))
    return np.stack([entry, exits, np.full_like(entry, -1)], axis=2)


def kept_in_bursts(stamps: Stamps, burst: int) -> Kept:
    """Return what is kept of all repetitions, added `burst` repetitions at a time."""
    kept = Kept()
    for first in range(0, stamps.shape[1], burst):
        kept.add(stamps[:, first : first + burst])
    return kept
