"""Digests of a whole training state, as they lie beside a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ddpbench.records import codec, store
from ddpbench.replicas.digest import of_bytes

FORMAT = 1  # another number: other digests of the same state
LONGEST = 200  # characters of a text; a longer one ends with its digest


@dataclass(frozen=True)
class TensorDigest:
    """The form of a whole tensor, and a digest of its bits."""

    dtype: str  # "float32"
    shape: tuple[int, ...]
    digest: str  # 128 bits, hexadecimal


@dataclass(frozen=True)
class StateDigest:
    """Digests of the whole tensors of a training state, however it is sharded or replicated.

    Names are those of a checkpoint of {"model": …, "optim": …} with the two results of
    torch.distributed.checkpoint.state_dict.get_state_dict: "model.0.weight",
    "optim.state.0.weight.exp_avg". Options are "optim.param_groups.0.lr" and so on, and
    "optim.group_of.0.weight" is the number of a parameter's group.
    """

    tensors: dict[str, TensorDigest]
    values: dict[str, str]  # what is no tensor, as text
    format: int = FORMAT

    def save(self, path: str | Path) -> None:
        """Write the digests to a file, as JSON. They are the same in all ranks: call it in one."""
        store.replace_file(Path(path), codec.encode(self))

    @classmethod
    def load(cls, path: str | Path) -> StateDigest:
        """Read what `save` wrote. Raises OSError, and ValueError with one sentence."""
        try:
            digest = codec.decode(cls, codec.parse(store.read_file(Path(path))))
        except ValueError as error:
            raise ValueError(f"{path} holds no digests of a state: {error}") from None
        if digest.format != FORMAT:
            raise ValueError(
                f"{path} has digests of format {digest.format}, this ddpbench makes format "
                f"{FORMAT}: compare them with the ddpbench that wrote them"
            )
        return digest

    def differences(self, other: StateDigest) -> list[str]:
        """Return one sentence for each tensor or value that differs; none if the states are equal.

        "Here" is this state.
        """
        here: dict[str, TensorDigest | str] = {**self.tensors, **self.values}
        there: dict[str, TensorDigest | str] = {**other.tensors, **other.values}
        return [
            f"{name} {_compare(here.get(name), there.get(name))}"
            for name in {**here, **there}
            if here.get(name) != there.get(name)
        ]


def _compare(here: TensorDigest | str | None, there: TensorDigest | str | None) -> str:
    if here is None or there is None:
        return "exists only here" if there is None else "is missing here"
    if isinstance(here, TensorDigest) and isinstance(there, TensorDigest):
        if here.shape != there.shape:
            return f"has shape {here.shape} here and {there.shape} in the other state"
        if here.dtype != there.dtype:
            return f"has dtype {here.dtype} here and {there.dtype} in the other state"
        return "has other bits here than in the other state"
    one, other = (
        f"a tensor of {each.dtype} {each.shape}" if isinstance(each, TensorDigest) else each
        for each in (here, there)
    )
    return f"is {one} here and {other} in the other state"


def name_dtype(tensor: Tensor) -> str:
    """Return "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def format_sums(sums: Sequence[int]) -> str:
    """Return a digest for its two sums of 64 bits."""
    return "".join(f"{each % 2**64:016x}" for each in sums)


def format_value(value: Any) -> str:
    """Return a value as text that is the same in any process; a tuple is written as a list."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… {of_bytes(text.encode()):016x}"
