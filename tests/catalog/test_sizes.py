"""Sizes as users write and read them."""

import itertools
import re

import pytest
from frozen import Frozen

from ddpbench.catalog import sizes

K, M, G = 1024, 1024**2, 1024**3


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1k,1K,1KiB,1024B,1024", (K,)),
        ("1M, 64K ,2G", (64 * K, M, 2 * G)),
        ("4:63:x4", (4, 16)),
        ("8:1K:X2", (8, 16, 32, 64, 128, 256, 512, 1024)),
        ("3:3:x2", (3,)),
        ("64,4:64:x4,1", (1, 4, 16, 64)),
    ],
)
def test_what_is_written_is_what_is_meant(text: str, meant: tuple[int, ...]) -> None:
    """Lists, factors and steps, in binary units, give ascending sizes, each once."""
    assert sizes.parse(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "", "4,,8", "-4", "1MB", "0:4:x2", "4:8", "8:4:x2", "4:8:2", "4:1KB:x2", "4:8:x1"
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_sentence(text: str, frozen: Frozen) -> None:
    """A ValueError says what was given and what is allowed, in one line."""
    with pytest.raises(ValueError, match=re.escape(repr(text))) as caught:
        sizes.parse(text)
    assert "\n" not in str(caught.value)
    frozen.text(str(caught.value))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (K, "1 KiB"), (K + 1, "1025 B"), (64 * M, "64 MiB"),
        (M + K, "1025 KiB"), (3 * G, "3 GiB"), (G - 4, f"{G - 4} B"),
    ],
)  # fmt: skip
def test_sizes_are_read_without_rounding(nbytes: int, text: str) -> None:
    """The largest unit in which the size is a whole number; bytes where there is none."""
    assert sizes.readable(nbytes) == text


def test_a_size_is_rounded_down_to_whole_blocks() -> None:
    """The total is the largest that is not above what was asked for and divides into equal blocks
    of whole elements; where not even one element a block fits, it is one element a block."""
    for asked, element, blocks in itertools.product(range(1, 130), (1, 2, 4, 8), range(1, 6)):
        total, count = sizes.round_to_blocks(asked, element, blocks)
        allowed = [c * element * blocks for c in range(1, 130) if c * element * blocks <= asked]
        assert total == max(allowed, default=element * blocks)
        assert total == count * element * blocks
