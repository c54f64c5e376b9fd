"""What nccl-tests and rccl-tests print, of all releases since 2.0: columns came, none moved."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpbench.interchange.log import Row, Section
from ddpbench.interchange.nccl_tests import PROGRAMS, Setup, dotted, figure, program

MARK = re.compile(r"^\s*# (?:nThread|Collective test starting|[nr]ccl-tests version)", re.MULTILINE)
SETUP = re.compile(
    r"# nThread:? (?P<threads>\d+) nGpus:? (?P<gpus>\d+) .*?"
    r"warmup ?[iI]ters: \d+ iters: (?P<iterations>\d+)(?: agg iters: (?P<aggregated>\d+))?"
    r"(?: validation: (?P<validation>\d+))?(?: graph: (?P<graph>\d+))?"
    r"(?: unalign: (?P<unalign>\d+))?"
)
DEVICE = re.compile(
    r"#\s+Rank\s+\d+\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\s+(?P<hostname>\S+)\s+"
    r"device\s+\d+\s+\[[^\]]*\]\s*(?P<gpu_name>.*)"
)
VERSION = re.compile(r"# (?P<tool>nccl|rccl)-tests version (?P<version>\S+)(.*-library=(\d+))?")
LIBRARY = re.compile(r"\b[NR]CCL version ?:? ?(\d+\.\d+\.\d+)")
STARTING = re.compile(r"# Collective test starting: (\S+)")
OUT_OF_BOUNDS = re.compile(r"# Out of bounds values\s*: (\d+) FAILED")
END = re.compile(r"# Avg bus bandwidth\s*:")


def is_one(text: str) -> bool:
    """Whether this is what a test prints."""
    return bool(MARK.search(text))


def read(path: Path, text: str) -> tuple[str, list[Section]]:
    """The tool and its sections. Raises ValueError with one sentence."""
    lines = [line.strip() for line in text.splitlines()]
    starts = [i for i, line in enumerate(lines) if SETUP.match(line)]
    if not starts:
        raise ValueError("ends before the line '# nThread …' of nccl-tests, or that is damaged")
    sections = []
    for start, before, end in zip(starts, [0, *starts], [*starts[1:], len(lines)], strict=False):
        setup = _setup(path.name, lines[before:start], lines[start:end])
        body = lines[start:end]
        if not any(END.match(line) for line in body):
            raise ValueError(
                f"ends within {setup.program}_perf: the line '# Avg bus bandwidth' of a whole test "
                "is not there"
            )
        rows = [*_rows(setup, body, start + 1)]
        sections.append(setup.section(_marked(rows, body), notes=(_assumed(setup),)))
    return setup.tool, sections


def _assumed(setup: Setup) -> str:
    return (
        f"{setup.tool} prints no -a: its default, the mean over ranks, is assumed; what -J writes "
        "has the whole command line"
    )


def _setup(filename: str, head: Sequence[str], body: Sequence[str]) -> Setup:
    """head: the lines since the test before; body: from '# nThread …' on."""
    found = SETUP.match(body[0])
    assert found is not None
    number = {name: int(value) for name, value in found.groupdict().items() if value is not None}
    version = next((m for line in reversed(head) if (m := VERSION.search(line))), None)
    text = "\n".join([*head, *body])
    library = LIBRARY.search(text)
    code = version[4] if version else None
    blocking = next((line for line in body if line.startswith("# Blocking Enabled")), "")
    world_size, ranks = _devices(body, number["threads"] * number["gpus"])
    return Setup(
        program=_program(filename, head),
        tool=f"{version['tool']}-tests" if version else "nccl-tests",
        version=version["version"] if version else None,
        library=dotted(int(code)) if code else library[1] if library else None,
        iterations=number["iterations"],
        aggregated=number.get("aggregated", 1),
        graph=number.get("graph", 0),
        blocking=_blocking(blocking),
        average=1,
        unalign=number.get("unalign", 0),
        world_size=world_size,
        ranks=ranks,
        cpu_time=any(line.startswith("#") and "cputime" in line.split() for line in body),
    )


def _blocking(line: str) -> int:
    """-z, from the line that tells of it."""
    if "outer iteration" in line:
        return 3
    return 2 if "no barrier" in line else int(bool(line))


def _program(filename: str, head: Sequence[str]) -> str:
    """The test's name. Old releases print none: then it must stand in the file's."""
    said = next((m[1] for line in reversed(head) if (m := STARTING.search(line))), None)
    named = sorted(PROGRAMS, key=len, reverse=True)
    name = said or next((f"{n}_perf" for n in named if f"{n}_perf" in filename), None)
    if name is None:
        raise ValueError(
            "does not say which test it is of, as older nccl-tests do not: put the test's name "
            "into the file's, as all_reduce_perf.log"
        )
    return program(name)


def _devices(body: Sequence[str], each: int) -> tuple[int, tuple[dict[str, Any], ...]]:
    """The number of ranks and what is known of them; each: GPUs of one process."""
    found = [m for line in body if (m := DEVICE.match(line))]
    groups = Counter(m["group"] for m in found)
    if not found or len(set(groups.values())) > 1 or len(found) % each:
        raise ValueError(
            "the list '# Using devices' is not whole: the number of ranks is not known"
        )
    one = [m for m in found if m["group"] == found[0]["group"]]
    return len(one), tuple({"hostname": m["hostname"], "gpu_name": m["gpu_name"]} for m in one)


def _rows(setup: Setup, body: Sequence[str], first: int) -> Iterator[Row]:
    """first: the number of the body's first line in the file."""
    columns: list[str] = []
    for number, line in enumerate(body, first):
        words = line.split()
        if words[:4] == ["#", "size", "count", "type"]:
            columns = words[1:]
        elif columns and len(words) > 2 and words[0].isdigit() and words[1].isdigit():
            try:
                yield from _row(setup, columns, words)
            except (ValueError, IndexError):
                raise ValueError(f"line {number} is damaged: {line[:80]!r}") from None


def _row(setup: Setup, columns: Sequence[str], words: Sequence[str]) -> Iterator[Row]:
    """Out of place and in place. Old releases leave redop blank where there is none, and have no
    column root where there is none."""
    heads = [i for i, name in enumerate(columns) if name in ("time", "cputime")]
    width, stamp = heads[1] - heads[0], 2 * ("timestamp" in columns)
    between = words[3 : len(words) - 2 * width - stamp]
    if len(between) > heads[0] - 3:
        raise ValueError
    if not int(words[0]):
        return  # asked for less than a block a rank: nothing was sent
    numbers = [int(word) for word in between if re.fullmatch(r"-?\d+", word)]
    names = [word for word in between if not re.fullmatch(r"-?\d+", word)]
    values = words[3 + len(between) :]
    for place, at in (("out", 0), ("in", width)):
        case = setup.case(
            words[2], names[0] if names else None, numbers[0] if numbers else -1,
            int(words[0]), int(words[1]), place,
        )  # fmt: skip
        wrong = values[at + 3]
        counted = None if wrong == "N/A" else float(wrong)
        # In the place of the count, old releases have the largest error, which is not 0 when right.
        told = counted if columns[heads[0] + 3] == "#wrong" else 0
        yield figure(setup, case, float(values[at]) * 1e-6, counted is not None, told)


def _marked(rows: Sequence[Row], body: Sequence[str]) -> list[Row]:
    """All wrong, where the end tells of values out of bounds and no row says which."""
    failed = next((m for line in body if (m := OUT_OF_BOUNDS.match(line))), None)
    if failed is None or any(row.wrong for row in rows):
        return list(rows)
    return [replace(row, wrong=f"{failed[1]} checks out of bounds, not of which") for row in rows]
