"""Read the table of nccl-tests and rccl-tests, whose rows NCCL's own lines may interrupt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import takewhile

from ddpbench.interchange.log import Row
from ddpbench.interchange.nccl_tests import Setup, build_row

HEADS = re.compile(r"#?\s*size\s+count\s+type\b")
ROW = re.compile(
    r"(?<![\w.-])\d{1,15}\s+\d{1,15}\s+(?:u?int\d*|char|half|float|double|bfloat16|fp?8_?e\dm\d)(?=\s|$)"
)
# host:process:thread [device] …, which may stand right behind a number.
NOISE = re.compile(r"(?:(?<!/)[A-Za-z][\w.-]*:\d+:\d+ \[-?\d+\]|[NR]CCL version).*")
VALUE = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d{1,2})?\*?|N/A")
ROOT = re.compile(r"-1|\d{1,4}")  # a time without a point is longer
ERROR = re.compile(r"\s(?:\de-\d\d|0e\+00)(?:\s|$)")


@dataclass(frozen=True)
class Layout:
    """The columns of a table."""

    places: tuple[str, ...] = ("out", "in")
    width: int = 4  # columns of each place
    counts: bool = True  # "#wrong"; older releases print the largest error, not 0 when right
    cpu_time: bool = False


@dataclass(frozen=True)
class Figures:
    """A row. sides: for each place the texts of time, algbw, busbw and #wrong."""

    size: int
    count: int
    dtype: str
    reduce_op: str | None
    root: int | None
    sides: tuple[Sequence[str], ...]


def read_layout(lines: Sequence[str]) -> Layout:
    """Read the columns from their heads; without heads, assume those of most releases."""
    at = next((i for i, line in enumerate(lines) if HEADS.match(line)), None)
    if at is None:
        return Layout(counts=not any(ERROR.search(line) for line in lines if ROW.match(line)))
    names = lines[at].lstrip("# ").split()
    times = [i for i, name in enumerate(names) if name in ("time", "cputime")]
    if not times or len(names) < times[-1] + 4:
        return Layout()
    two = len(times) == 2
    only = "in" if at and lines[at - 1].strip("# ").startswith("in-place") else "out"
    return Layout(
        places=("out", "in") if two else (only,),
        width=times[1] - times[0] if two else 4,
        counts=names[times[0] + 3] == "#wrong",
        cpu_time=names[times[0]] == "cputime",
    )


def read_figures(lines: Sequence[str], layout: Layout, damaged: list[int]) -> Iterator[Figures]:
    """Read the whole rows; add the index of each incomplete or inconsistent row to damaged."""
    words: list[str] = []
    start = 0
    for i, line in enumerate(lines):
        if row := ROW.match(line):
            if words:
                damaged.append(start)
            words, start = [*row[0].split(), *_leading(line[row.end() :])], i
        elif words and not line.startswith("#"):
            more = NOISE.sub("", line).split()
            words += more if all(VALUE.fullmatch(word) for word in more) else []
        if words and len(words) >= 3 + len(_middle(words)) + layout.width * len(layout.places):
            try:
                yield from _row(words, layout)
            except ValueError:
                damaged.append(start)
            words = []
    if words:
        damaged.append(start)


def _leading(text: str) -> list[str]:
    """Return the words after the type, up to another program's output in the row."""
    words = NOISE.sub("", text).split()
    names = words[:1] if words and words[0].isalpha() else []
    numbers = takewhile(lambda w: VALUE.fullmatch(w) or w == "-1", words[len(names) :])
    return [*names, *numbers]


def _middle(words: Sequence[str]) -> Sequence[str]:
    """Return the words between type and time: redop, root, both or, in old releases, neither."""
    end = 3 + (len(words) > 3 and words[3].isalpha())
    end += len(words) > end and ROOT.fullmatch(words[end]) is not None
    return words[3:end]


def _row(words: Sequence[str], layout: Layout) -> Iterator[Figures]:
    """Read a row, unless it has size 0. Raises ValueError if its numbers contradict each other."""
    middle = _middle(words)
    size, count = int(words[0]), int(words[1])
    first = 3 + len(middle)
    sides = [words[first + layout.width * i :][:4] for i in range(len(layout.places))]
    if not size:
        return  # less than a block for each rank was asked for: nothing was sent
    if not count or size % count:
        raise ValueError
    for time, algbw, busbw, _ in sides:
        (least, most), (slowest, fastest), _ = bounds(time), bounds(algbw), bounds(busbw)
        # With -C the rate is of another time than that printed.
        if not layout.cpu_time and not (
            least * slowest * 0.99e3 <= size <= most * fastest * 1.01e3
        ):
            raise ValueError
    names = [word for word in middle if word.isalpha()]
    roots = [int(word) for word in middle if not word.isalpha()]
    yield Figures(
        size, count, words[2], names[0] if names else None, roots[0] if roots else None, (*sides,)
    )


def bounds(word: str) -> tuple[float, float]:
    """Return the range of a printed number before it was rounded. Raises ValueError."""
    if word == "N/A":
        raise ValueError("is no number: N/A")
    number = Decimal(word.rstrip("*"))
    half = 0.5 * 10.0 ** int(number.as_tuple().exponent)
    return max(float(number) - half, 0.0), float(number) + half


def build_rows(setup: Setup, layout: Layout, row: Figures) -> Iterator[Row]:
    """Build the cases of a row: out of place, in place or both."""
    for place, (time, _, _, wrong) in zip(layout.places, row.sides, strict=True):
        root = -1 if row.root is None else row.root
        case = setup.case(
            row.dtype, row.reduce_op, root=root, nbytes=row.size, count=row.count, place=place
        )
        counted = None if wrong == "N/A" else float(wrong.rstrip("*"))
        known = counted if layout.counts else 0
        yield build_row(setup, case, float(time) * 1e-6, counted is not None, known)
