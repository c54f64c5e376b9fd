"""The pattern of a verification, from which its likely cause is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ddpbench.replicas.report import Difference, Mismatch, NonFinite, WithoutGradient
from ddpbench.replicas.state import is_option
from ddpbench.replicas.usage import EqualCounts


@dataclass(frozen=True)
class Facts:
    """The pattern of a verification, the same in every rank."""

    differences: tuple[Difference, ...]
    mismatches: tuple[Mismatch, ...]
    nonfinite: tuple[NonFinite, ...]
    without_gradient: tuple[WithoutGradient, ...]
    gradients: int  # number of compared gradients; 0 if there are none or they were not wanted
    frozen: frozenset[str]  # parameters with requires_grad=False
    earlier: bool  # an earlier verification found all parameters equal
    unsynced: bool  # DDP's last forward ran under no_sync or no_grad in some rank
    unmanaged: int  # number of trained parameters that DDP does not manage, at most in any rank
    finds_unused: bool  # DDP looks for unused parameters itself
    rebroadcast: bool  # DDP sends rank 0's buffers before each forward
    optimizers: bool  # the caller passed an optimizer
    stepped: bool  # an optimizer has state in some rank
    stateless: bool  # an optimizer in some rank keeps no state, so its steps leave no trace
    steps: int  # number of step counts that the optimizers keep
    equal: EqualCounts
    averages: bool = False  # a rank has an object that averages parameters; known if some differ
    coordinates: tuple[tuple[int, str], ...] = ()  # as in Report
    # dimensions of the mesh along which a parameter is sharded, and others that its own mesh has
    sharded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    spanned: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def select(self, kind: str) -> list[Difference]:
        """Return the differences of a kind."""
        return [d for d in self.differences if d.kind == kind]

    @property
    def options(self) -> list[Difference]:
        """Options of the optimizer's groups that differ, such as lr."""
        return [d for d in self.select("optimizer") if is_option(d.name)]

    @property
    def kinds(self) -> set[str]:
        """Kinds that differ, without buffers: these differ whenever something else does."""
        return {d.kind for d in self.differences} - {"buffer"}

    @property
    def unlike(self) -> set[str]:
        """Kinds that do not match."""
        return {m.kind for m in self.mismatches}

    @property
    def only_difference(self) -> Difference | None:
        """The only tensor that differs, buffers aside; else the only buffer; None if several."""
        main = [d for d in self.differences if d.kind != "buffer"] or list(self.differences)
        return main[0] if len(main) == 1 else None

    @property
    def all_parameters(self) -> bool:
        """Whether all parameters differ, except constants, and there are several."""
        return len(self.select("parameter")) > 1 and not self.equal.parameters

    @property
    def all_gradients(self) -> bool:
        """Whether all gradients differ, except zeros, and there are several."""
        return len(self.select("gradient")) > 1 and not self.equal.gradients

    @property
    def reduced(self) -> bool:
        """Whether gradients were compared and are equal in all ranks."""
        mismatched = any(m.kind == "gradient" for m in self.mismatches)
        return self.gradients > 0 and not (mismatched or self.select("gradient"))

    @property
    def redrawn(self) -> bool:
        """Whether most elements differ in each differing parameter, as after a new random draw."""
        details = [detail for d in self.select("parameter") for detail in d.details]
        return bool(details) and all(2 * d.differing > d.elements for d in details)

    @property
    def mesh(self) -> bool:
        """Whether the tensors lie on a mesh."""
        return bool(self.coordinates)

    @property
    def along(self) -> tuple[str, ...]:
        """Dimensions of the mesh along which parameters or gradients differ, in its order.

        A dimension counts if two ranks hold different values and differ in this coordinate alone.
        If no parameter or gradient differs, all differences count.
        """
        places = {rank: tuple(text.split(", ")) for rank, text in self.coordinates}
        names = [part.rpartition("=")[0] for part in next(iter(places.values()), ())]
        main = self.select("parameter") + self.select("gradient") or self.differences
        patterns = [dict(_numbered(values, places)) for values in {d.values for d in main}]
        return tuple(
            name
            for axis, name in enumerate(names)
            if any(_differs_along(axis, pattern) for pattern in patterns)
        )

    @property
    def unsharded(self) -> tuple[str, ...]:
        """Dimensions of `along` that replicate the whole model: they shard no parameter."""
        used = frozenset().union(*self.sharded.values())
        return tuple(name for name in self.along if name not in used)


def _numbered(
    values: Sequence[Sequence[int]], places: Mapping[int, tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the coordinates of each rank, and a number for the value that it holds."""
    for number, ranks in enumerate(values):
        yield from ((places[rank], number) for rank in ranks if rank in places)


def _differs_along(axis: int, numbers: Mapping[tuple[str, ...], int]) -> bool:
    seen: dict[tuple[str, ...], int] = {}
    return any(
        seen.setdefault(place[:axis] + place[axis + 1 :], number) != number
        for place, number in numbers.items()
    )
