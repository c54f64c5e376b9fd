"""Names of ranks in sentences: numbers, or coordinates if tensors lie on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ddpbench.records.wording import spans
from ddpbench.replicas.report import ranks_text


class Places:
    """Names sets of ranks by their coordinates, "dp_replicate=1, tp=0" of each rank, if any."""

    def __init__(self, coordinates: Sequence[tuple[int, str]]) -> None:
        self._where = {
            rank: dict(part.split("=") for part in text.split(", ")) for rank, text in coordinates
        }
        self.known = bool(coordinates)

    def name(self, ranks: Sequence[int]) -> str:
        """Return "dp_replicate=1 (ranks 4-7)", or "ranks 4-7" if no coordinates describe them."""
        values = self._values(ranks)
        everywhere = self._values(list(self._where))
        narrowed = {name: values[name] for name in values if values[name] != everywhere[name]}
        if not narrowed or prod(map(len, values.values())) != len(ranks):
            return ranks_text(ranks)
        shown = values if len(ranks) == 1 else narrowed
        return f"{_join(shown)} ({ranks_text(ranks)})"

    def contrast(self, ranks: Sequence[int], others: Sequence[int]) -> str:
        """Name ranks by the coordinates in which they are not like the others."""
        values, against = self._values(ranks), self._values(others)
        unlike = {name: values[name] for name in values if values[name] != against[name]}
        if not unlike or prod(map(len, values.values())) != len(ranks):
            return self.name(ranks)
        return _join(unlike)

    def list_coordinates(self, ranks: Sequence[int]) -> list[str]:
        """Return the coordinates of each rank; [] if there are none."""
        return [
            ", ".join(f"{name}={value}" for name, value in self._where[rank].items())
            for rank in ranks
            if rank in self._where
        ]

    def _values(self, ranks: Sequence[int]) -> dict[str, set[int]]:
        if not ranks or any(rank not in self._where for rank in ranks):
            return {}
        return {name: {int(self._where[r][name]) for r in ranks} for name in self._where[ranks[0]]}


def _join(values: dict[str, set[int]]) -> str:
    return ", ".join(f"{name}={spans(sorted(each))}" for name, each in values.items())
