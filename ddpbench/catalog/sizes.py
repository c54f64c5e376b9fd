"""Parse and format sizes in bytes, with K, M, G = 1024, 1024², 1024³."""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SYNTAX = "4:64M:x4 (by factor) or 1K,64K,1M (a list)"
DEFAULTS = {"cpu": "4:64M:x4", "cuda": "8:1G:x4"}  # of a sweep, by kind of device
GLOO_DEFAULTS = {**DEFAULTS, "cuda": "8:64M:x4"}  # it moves CUDA tensors at about 1 GB/s


def default_sizes(backend: str, kind: str) -> tuple[int, ...]:
    """Return the sizes of a sweep without --sizes. kind: of the device, "cpu" or "cuda"."""
    return parse((GLOO_DEFAULTS if backend == "gloo" else DEFAULTS)[kind])


def parse(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes that `text` lists, ascending and without repetition.

    Raises ValueError with what is wrong and what is allowed.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        bounds = part.strip().split(":")
        if len(bounds) == 1:
            sizes.add(_size(bounds[0], text))
        elif len(bounds) == 3:
            sizes.update(_series(bounds[0], bounds[1], bounds[2], text))
        else:
            raise ValueError(f"{text!r} is not a list of sizes: write {SYNTAX}")
    return tuple(sorted(sizes))


def _size(word: str, text: str) -> int:
    given = repr(word) if word == text else f"{word!r} in {text!r}"
    match = re.fullmatch(r"(\d+)(?:([KMG])(?:iB)?|B?)", word.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(
            f"{given} is not a size: write 4, 64K, 1M or 2G (K, M, G = 1024, 1024², 1024³ bytes, "
            "as in nccl-tests), or a number of bytes"
        )
    size = int(match[1]) * UNITS[(match[2] or "").upper()]
    if size < 1:
        raise ValueError(f"{given} is too small: the smallest size is 1 byte")
    return size


def _series(first: str, last: str, step: str, text: str) -> list[int]:
    low, high = _size(first, text), _size(last, text)
    if low > high:
        raise ValueError(f"{text!r} goes from {first} down to {last}: write the smaller size first")
    factor = re.fullmatch(r"x(\d+)", step.strip(), re.IGNORECASE)
    if not factor or int(factor[1]) < 2:
        raise ValueError(f"unknown step {step!r} in {text!r}: write x2 to multiply by 2")
    sizes = [low]
    while sizes[-1] * int(factor[1]) <= high:
        sizes.append(sizes[-1] * int(factor[1]))
    return sizes


def readable(nbytes: int) -> str:
    """Format a size as 4 B, 64 KiB or 1 MiB if that is exact, else in bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def round_to_blocks(nbytes: int, element_nbytes: int, blocks: int) -> tuple[int, int]:
    """Round a size down to `blocks` equal blocks of whole elements, at least one element each.

    Returns (total bytes, elements of one block).
    """
    count = max(1, nbytes // (element_nbytes * blocks))
    return count * element_nbytes * blocks, count
