"""Raw samples reduced case by case, so that a run of 10⁷ stamps needs the memory of one case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddpbench.analysis.stats import Floats
from ddpbench.records import store
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Run

if TYPE_CHECKING:
    import pandas as pd

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Repetitions:
    """One case in one launch."""

    case: str  # as its samples name it
    launch: int
    numbers: Ints  # of the repetitions, ascending; below 0: warm-up, the cold call first
    seconds: Floats  # of each repetition, on its slowest rank; of all its calls together
    ranks: Ints  # that have stamps, ascending
    # float64[rank], median over timed repetitions, seconds: how long after the first rank of its
    # subgroup a rank entered (by the clocks' stamps, comparable or not), and how long it stayed.
    late: Floats
    stay: Floats


def reduce_samples(run: Run, folder: Path) -> Iterator[Repetitions]:
    """Reduce the samples of a stored run. Raises InvalidRun for a damaged file."""
    groups = {result.case.key: result.case.group for result in run.results}
    launches = {launch.index: launch for launch in run.launches}
    for (case, index), frame in _by_case(folder):
        subgroups = _subgroups(groups.get(case, "world"), launches.get(index))
        yield _reduce(case, index, frame, subgroups)


def _by_case(folder: Path) -> Iterator[tuple[tuple[str, int], pd.DataFrame]]:
    """Join what successive row groups hold of the same case and launch."""
    import pandas as pd

    held: tuple[tuple[str, int], pd.DataFrame] | None = None
    for frame in store.iterate_samples(folder):
        groups: Any = frame.groupby(["case", "launch"], observed=True, sort=False)
        for (case, launch), part in groups:
            name = str(case), int(launch)
            if held and held[0] == name:
                part = pd.concat([held[1], part])
            elif held:
                yield held
            held = name, part
    if held:
        yield held


def _subgroups(group: str, launch: Launch | None) -> Mapping[int, int]:
    """Return the subgroup of each rank; empty if all ranks work together, or it is not known."""
    if launch is None or group not in ("host", "cross"):
        return {}
    hosts: dict[str, list[int]] = {}
    for rank, facts in enumerate(launch.ranks):
        hosts.setdefault(str(facts.get("hostname")), []).append(rank)
    if group == "host":
        return {rank: number for number, host in enumerate(hosts.values()) for rank in host}
    return {rank: number for host in hosts.values() for number, rank in enumerate(host)}


def _reduce(
    case: str, launch: int, frame: pd.DataFrame, subgroups: Mapping[int, int]
) -> Repetitions:
    order = np.lexsort((frame["rank"].to_numpy(), frame["repetition"].to_numpy()))
    columns = ("repetition", "rank", "entry_ns", "exit_ns", "device_ns")
    repetition, rank, entry, exits, device = (
        frame[name].to_numpy(np.int64)[order] for name in columns
    )
    spent = device if (device >= 0).all() else exits - entry
    starts = np.flatnonzero(np.diff(repetition, prepend=repetition[0] - 1))
    ranks = np.unique(rank)
    # Of very many ranks only some are kept in later repetitions.
    whole = (np.diff(starts, append=len(rank)) == len(ranks)) & (repetition[starts] >= 0)
    cells = starts[whole][:, None] + np.arange(len(ranks))  # [repetition, rank]
    late = _lateness(entry[cells], ranks, subgroups)
    return Repetitions(
        case,
        launch,
        repetition[starts],
        np.maximum.reduceat(spent, starts) * 1e-9,
        ranks,
        _medians(late),
        _medians(spent[cells]),
    )


def _lateness(entry: Ints, ranks: Ints, subgroups: Mapping[int, int]) -> Ints:
    """Return the time after the first entry of the same subgroup: int64[repetition, rank]."""
    members = np.array([subgroups.get(int(rank), 0) for rank in ranks])
    late = np.empty_like(entry)
    for number in np.unique(members):
        part = entry[:, members == number]
        late[:, members == number] = part - part.min(axis=1, keepdims=True, initial=2**62)
    return late


def _medians(values: Ints) -> Floats:
    if not len(values):
        return np.full(values.shape[1], np.nan)
    return np.asarray(np.median(values, axis=0) * 1e-9, dtype=np.float64)
