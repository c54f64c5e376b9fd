"""The digests of a checkpoint of torch.distributed.checkpoint, read in one process."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ddpbench.replicas.global_digest import digest_shard
from ddpbench.replicas.state_digest import (
    StateDigest,
    TensorDigest,
    format_sums,
    format_value,
    name_dtype,
)

MOST_BYTES = 1 << 28  # read at once, unless one tensor is larger
_GROUP = re.compile(r"(?:(.*)\.)?param_groups\.(\d+)\.params")


def digest_checkpoint(folder: Path) -> StateDigest:
    """Digest a checkpoint under its own names, without a process group.

    Needs memory for the largest tensor, or for 256 MiB. As torch does, it unpickles the metadata
    and what is no tensor: read only checkpoints that you trust. Raises ValueError with one sentence
    if the folder holds no checkpoint, or a damaged one.
    """
    if not folder.exists():
        raise ValueError(f"{folder} does not exist: name a folder with a checkpoint")
    if not (folder / ".metadata").is_file():
        raise ValueError(
            f"{folder} holds no checkpoint of torch.distributed.checkpoint: .metadata is missing"
        )
    tensors, values = {}, {}
    try:
        for name, value in _read_items(folder):
            if isinstance(value, torch.Tensor):
                shape = tuple(value.shape)
                sums = digest_shard(value, shape, [0] * len(shape)).tolist()
                tensors[name] = TensorDigest(name_dtype(value), shape, format_sums(sums))
            else:
                values[name] = format_value(value)
    except (Exception, dcp.CheckpointException) as error:  # unpickling damage can raise anything
        line = (str(error).strip().splitlines() or [""])[-1]
        raise ValueError(
            f"{folder} holds a checkpoint that cannot be read: {type(error).__name__}: {line}"
        ) from None
    return StateDigest(tensors, values)


def _read_items(folder: Path) -> Iterator[tuple[str, Any]]:
    reader = dcp.FileSystemReader(folder)
    batch: dict[str, Any] = {}
    nbytes = 0
    for name, form in reader.read_metadata().state_dict_metadata.items():
        batch[name] = None
        if isinstance(form, TensorStorageMetadata):
            batch[name] = torch.empty(form.size, dtype=form.properties.dtype)
            nbytes += batch[name].nbytes
        if nbytes >= MOST_BYTES:
            yield from _load(reader, batch)
            batch, nbytes = {}, 0
    yield from _load(reader, batch)


def _load(reader: dcp.FileSystemReader, batch: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is alone
        dcp.load(batch, storage_reader=reader, no_dist=True)
    for name, value in batch.items():
        if not (group := _GROUP.fullmatch(name)):
            yield name, value
            continue
        prefix = f"{group[1]}." if group[1] else ""
        yield from ((f"{prefix}group_of.{parameter}", int(group[2])) for parameter in value)
