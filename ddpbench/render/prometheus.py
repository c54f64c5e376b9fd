"""A run in Prometheus' text exposition format: one entry of a table adds a metric.

Base units. The labels of a figure are the identity of what was measured, so that a series holds
comparable figures only; the run's name is a label of `ddpbench_run_info` alone, or each run would
start new series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddpbench.records.schema import Case, Interval, Run, StepCase
from ddpbench.version import VERSION

if TYPE_CHECKING:
    from ddpbench.analysis.lines import Line
    from ddpbench.analysis.step_lines import StepLine

T = TypeVar("T", "Line", "StepLine")
DERIVED = ("count",)  # of other labels


@dataclass(frozen=True)
class Metric(Generic[T]):
    """A gauge: what it is, and its value for one line; None: none there."""

    help: str
    value: Callable[[T], float | None]


def _end(of: Callable[[T], Interval | None], name: str) -> Callable[[T], float | None]:
    def value(line: T) -> float | None:
        interval = of(line)
        return None if interval is None else float(getattr(interval, name))

    return value


def _bad(line: Line | StepLine) -> float:
    return float(bool({"WRONG", "INVALID", "DIFFER", "NONFINITE"} & set(line.flags)))


def _replicas_equal(line: StepLine) -> float | None:
    found = line.replicas
    if found is None or (found.not_compared and not found.failed):
        return None
    return float(found.equal)


def _exposed(line: StepLine) -> float | None:
    from ddpbench.analysis import steps

    part = line.part(steps.EXPOSED)
    return None if part is None else part.figure.value


def _exposed_interval(line: StepLine) -> Interval | None:
    from ddpbench.analysis import steps

    part = line.part(steps.EXPOSED)
    return None if part is None else part.figure.interval


COLLECTIVES: dict[str, Metric[Line]] = {
    "ddpbench_collective_seconds": Metric(
        "Time of one call, as the labels statistic and rank_reduction say.",
        lambda line: line.seconds,
    ),
    "ddpbench_collective_low_seconds": Metric(
        "Low end of its 95 % interval.", _end(lambda line: line.interval, "low")
    ),
    "ddpbench_collective_high_seconds": Metric(
        "High end of its 95 % interval.", _end(lambda line: line.interval, "high")
    ),
    "ddpbench_collective_algorithm_bytes_per_second": Metric(
        "Size over time.", lambda line: line.algbw
    ),
    "ddpbench_collective_bus_bytes_per_second": Metric(
        "Size over time, by the operation's bus factor (nccl-tests).", lambda line: line.busbw
    ),
    "ddpbench_collective_launches": Metric(
        "Launches in which it was measured.", lambda line: len(line.results)
    ),
    "ddpbench_collective_bad": Metric(
        "1: a result was wrong, or faster than the data can move; do not use its figures.", _bad
    ),
}
STEPS: dict[str, Metric[StepLine]] = {
    "ddpbench_step_seconds": Metric(
        "Time of one DDP step, of the slowest rank.", lambda line: line.seconds
    ),
    "ddpbench_step_low_seconds": Metric(
        "Low end of its 95 % interval.", _end(lambda line: line.interval, "low")
    ),
    "ddpbench_step_high_seconds": Metric(
        "High end of its 95 % interval.", _end(lambda line: line.interval, "high")
    ),
    "ddpbench_step_samples_per_second": Metric(
        "Samples of all ranks.",
        lambda line: None if line.summary is None else line.summary.samples_per_second or None,
    ),
    "ddpbench_step_exposed_communication_seconds": Metric(
        "Communication of a step that backward does not hide; noise where the interval holds 0.",
        _exposed,
    ),
    "ddpbench_step_exposed_communication_low_seconds": Metric(
        "Low end of its 95 % interval.", _end(_exposed_interval, "low")
    ),
    "ddpbench_step_exposed_communication_high_seconds": Metric(
        "High end of its 95 % interval.", _end(_exposed_interval, "high")
    ),
    "ddpbench_step_replicas_equal": Metric(
        "1: all ranks' replicas were equal wherever they were verified.", _replicas_equal
    ),
    "ddpbench_step_launches": Metric(
        "Launches in which it was measured.", lambda line: len(line.results)
    ),
    "ddpbench_step_bad": Metric("1: the replicas differed, or were not finite.", _bad),
}


def exposition(run: Run, columns: tuple[str, ...] | None = None, quiet: bool = False) -> str:
    """The run as gauges, for a file that node_exporter or a gateway takes; no columns."""
    from ddpbench.analysis import lines, step_lines

    measured = [line for line in lines.lines(run) if line.results]
    steps = [line for line in step_lines.lines(run) if line.results]
    blocks = [*_of_run(run), *_blocks(COLLECTIVES, measured), *_blocks(STEPS, steps)]
    blocks += _not_measured("ddpbench_collective_not_measured", lines.lines(run))
    blocks += _not_measured("ddpbench_step_not_measured", step_lines.lines(run))
    return "".join(blocks)


def _not_measured(name: str, found: Iterable[Line | StepLine]) -> Iterator[str]:
    """A metric for the cases that have no figures."""
    samples: list[tuple[dict[str, str], float]] = [
        ({**_labels(line.case), "reason": line.reason or ""}, 1)
        for line in found
        if not line.results
    ]
    if samples:
        yield _block(name, "1: it was not measured, and why.", samples)


def _of_run(run: Run) -> Iterator[str]:
    info = {"run": run.id, "command": run.command, "state": run.state, "version": VERSION}
    yield _block("ddpbench_run_info", "The run that these figures are of.", [(info, 1)])
    if (started := _timestamp(run.started)) is not None:
        name = "ddpbench_run_start_time_seconds"
        yield _block(name, "When it began, since 1970.", [({}, started)])
    if run.exit_code is not None:
        name = "ddpbench_run_exit_code"
        yield _block(name, "How it ended; 0: nothing is wrong.", [({}, run.exit_code)])


def _timestamp(started: str) -> float | None:
    """Seconds since 1970 of a time in UTC; None of what another tool wrote, without a zone."""
    if not started.endswith("Z"):
        return None
    return datetime.fromisoformat(started.replace("Z", "+00:00")).timestamp()


def _blocks(table: Mapping[str, Metric[T]], lines: Iterable[T]) -> Iterator[str]:
    labelled = [(_labels(line.case), line) for line in lines]
    for name, metric in table.items():
        samples = [(labels, metric.value(line)) for labels, line in labelled]
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            yield _block(name, metric.help, known)


def _labels(case: Case | StepCase) -> dict[str, str]:
    """The identity; Prometheus takes an empty label for none."""
    return {f.name: _said(getattr(case, f.name)) for f in fields(case) if f.name not in DERIVED}


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return "" if value is None else str(value)


def _block(name: str, text: str, samples: Iterable[tuple[dict[str, str], float]]) -> str:
    """HELP, TYPE and the samples of one metric."""
    told = text.replace("\\", "\\\\").replace("\n", "\\n")
    rows = [f"{name}{_braces(labels)} {value!r}\n" for labels, value in samples]
    return "".join([f"# HELP {name} {told}\n# TYPE {name} gauge\n", *rows])


def _braces(labels: dict[str, str]) -> str:
    escape = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    inner = ",".join(f'{name}="{value.translate(escape)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""
