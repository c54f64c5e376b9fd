"""Plots in the terminal: `--plot` of `show` and of the commands that measure."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from command_lines import ROOT
from in_process import capture_command
from stored_runs import a_case, a_result, a_run, a_summary
from without_torch import RUN_AND_PRINT_CODE, run_without_torch

from ddpbench.records import codec, store
from ddpbench.records.schema import Run
from ddpbench.records.terminal_text import FALLBACK
from ddpbench.records.watched import Moment, Watched
from ddpbench.report.terminal import drawing
from ddpbench.report.terminal.plots import make_plots

REFERENCE = ROOT / "results" / "reference"
needs_plotext = pytest.mark.skipif(
    drawing.explain_missing("") is not None, reason=str(drawing.explain_missing("this test"))
)


class Terminal(io.TextIOWrapper):
    """A stream that says that it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding, errors=FALLBACK)

    def isatty(self) -> bool:
        return True


@cache
def read_reference(name: str) -> Run:
    """The stored run of this name."""
    return store.read(REFERENCE / name)


@needs_plotext
def test_show_plots_below_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """`show RUN --plot` draws time over size for every table, in 80 columns, without colours; each
    backend has a letter, the sizes and times are labelled."""
    words = (str(REFERENCE / "cpu-2-ranks"), "--plot", "--quiet")
    done = capture_command(capsys, *words, command="show")
    assert done.code == 0
    assert "\x1b" not in done.out
    tables, *plots = re.split(r"^(?=.*: time of a call\n)", done.out, flags=re.MULTILINE)
    assert "busbw" in tables
    assert [plot.split()[0] for plot in plots] == ["all_reduce", "all_gather", "broadcast"]
    for plot in plots:
        assert max(map(len, plot.splitlines())) <= 80
        assert {"mm mpi", "gg gloo"} <= set(re.findall(r"\w\w (?:mpi|gloo)", plot))
        assert re.search(r"^ *10 ms┤", plot, re.MULTILINE)
        assert re.search(r"128 B .* KiB .* MiB", plot)


@needs_plotext
def test_the_upper_line_is_of_the_slower_backend() -> None:
    """gloo takes longer at every size of the reference run: its line is above that of mpi."""
    plot = make_plots(read_reference("cpu-2-ranks"), io.StringIO()).split("\n\n")[0]
    inside = [row.partition("│")[2] or row.partition("┤")[2] for row in plot.splitlines()[4:16]]
    columns = ["".join(column) for column in zip(*(f"{row:<80}" for row in inside), strict=True)]
    assert sum("g" in column and "m" in column for column in columns) > 50
    assert not any("m" in column.partition("g")[0] for column in columns if "g" in column)


@needs_plotext
@pytest.mark.parametrize(
    ("variable", "value", "colored"), [("NO_COLOR", "1", False), ("TERM", "dumb", False),
                                       ("NO_COLOR", "", True)],
)  # fmt: skip
def test_a_terminal_gets_colors(
    variable: str, value: str, colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal gets coloured lines of its own width, unless NO_COLOR or TERM forbids colours."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "64")
    monkeypatch.setenv(variable, value)
    text = make_plots(read_reference("cpu-2-ranks"), Terminal())
    assert ("\x1b[38;5;208m" in text) is colored
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    frames = [line for line in plain.splitlines() if line.endswith(("│", "┐"))]
    assert {len(line) for line in frames} == {64}
    assert bool(re.search("[⠀-⣿]", plain)) is colored


@needs_plotext
def test_a_terminal_without_frames_gets_ascii() -> None:
    """Where the encoding lacks lines and dots, frames and bars are of ASCII characters."""
    stream = Terminal("ascii")
    for name in ("cpu-2-ranks", "ddp-cpu-2-ranks"):
        stream.write(make_plots(read_reference(name), stream))
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "\\u" not in text
    assert "+----" in text
    assert re.search(r"^compute +#{20,} 136\.\d+$", text, re.MULTILINE)


@needs_plotext
def test_sizes_and_times_close_together_are_labelled() -> None:
    """Two sizes without a power of two between them, and equal times, have labels all the same."""
    results = [a_result(a_case(nbytes=nbytes)) for nbytes in (5, 6)]
    text = make_plots(a_run(*results), io.StringIO())
    assert re.search(r"^ +5 B +6 B$", text, re.MULTILINE)
    assert re.search(r"^1 ms┤g+", text, re.MULTILINE)


@needs_plotext
def test_operations_without_a_size_are_bars() -> None:
    """A barrier has no size: its backends are compared by bars."""
    barrier = a_case(operation="barrier", reduce_op=None, nbytes=0, count=0)
    slow = replace(barrier, backend="mpi")
    run = a_run(a_result(barrier), a_result(slow, summary=a_summary(2e-3)))
    lines = make_plots(run, io.StringIO()).splitlines()
    assert lines[0].endswith("time of a call, ms")
    gloo, mpi = (line.count("▇") for line in lines[1:])
    assert mpi == pytest.approx(2 * gloo, abs=1)


@needs_plotext
def test_the_parts_of_a_step_are_bars() -> None:
    """The bars of a DDP step are the parts that make it, as long as they take."""
    text = make_plots(read_reference("ddp-cpu-2-ranks"), io.StringIO())
    gloo = text.split("\n\n")[0].splitlines()
    assert gloo[0] == "mlp on gloo: parts of a step, ms"
    lengths = {row[:21].strip(): row.count("▇") for row in gloo[1:]}
    assert list(lengths) == ["compute", "bucket copies", "exposed communication"]
    assert lengths["compute"] / lengths["exposed communication"] == pytest.approx(5.6, rel=0.1)


@needs_plotext
def test_a_watched_job_is_plotted_over_its_steps() -> None:
    """A watch shows the time of a step over the steps, and how much of it is exposed."""
    moments = tuple(Moment(float(n), n, 0.02 + n / 1e4, (0.0,) * 6, 0.005) for n in range(50))
    before = read_reference("ddp-cpu-2-ranks")
    watched = Watched(50, 50, 0.02, (), 0.005, {"node": 2}, moments)
    run = a_run(steps=(replace(before.steps[0], watched=watched),))
    text = make_plots(run, io.StringIO())
    assert text.startswith("mlp on gloo: time of a step, ms\n")
    assert "ss step" in text
    assert "ee exposed communication" in text


@needs_plotext
def test_the_doctor_is_plotted_as_bars() -> None:
    """A run of the doctor has a bar for each rank and for each link."""
    path = Path(__file__).parents[1] / "records" / "stored_doctor.json"
    run = codec.decode(Run, json.loads(path.read_text()))
    text = make_plots(run, io.StringIO())
    assert re.search(r"^time of matmul on each rank alone, ms\nrank 0 ▇+ 5\.70", text)
    assert re.search(r"^rank 1 to rank 0 ▇+ 2\.32\nrank 0 to rank 1 ▇+ 2\.60", text, re.MULTILINE)


def test_a_run_without_times_says_so() -> None:
    """A run in which nothing was measured has one sentence in place of plots."""
    assert make_plots(a_run(), io.StringIO()) == "this run has nothing to plot\n"


def test_without_plotext_plots_are_refused(tmp_path: Path) -> None:
    """Without plotext, --plot is refused with what to type, before anything is measured."""
    said = run_without_torch(
        f"sys.stderr = sys.stdout\n{RUN_AND_PRINT_CODE}",
        "collectives", "-n", "2", "--plot", "--output", str(tmp_path / "run"),
        forbidden=("torch", "plotext"),
    )  # fmt: skip
    assert said == "ddpbench: --plot needs plotext: type pip install 'ddpbench[report]'\n2\n"
    assert not (tmp_path / "run").exists()


def test_only_tables_have_plots_below(capsys: pytest.CaptureFixture[str]) -> None:
    """--plot with a format for machines is refused."""
    words = (str(REFERENCE / "cpu-2-ranks"), "--plot", "--format", "csv")
    done = capture_command(capsys, *words, command="show")
    assert (done.code, done.out) == (2, "")
    assert "--plot draws below tables: leave out --format csv" in done.err
