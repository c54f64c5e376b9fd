"""`ab`: measures variants in turns until the verdict is clear, and refuses wrong requests."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import sys
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command_lines import (
    ONE_SENTENCE,
    ROOT,
    run_all_warm,
)
from frozen import Frozen
from stored_runs import a_case, a_launch, a_result, a_run, a_summary

from ddpbench import cli
from ddpbench.commands import ab
from ddpbench.launch.placement import Refused
from ddpbench.nested_runs import turns
from ddpbench.nested_runs.turns import Failed, Variant, parse_variant
from ddpbench.records import store
from ddpbench.records.schema import Finding, Run

Times = dict[str, Callable[[int], float]]  # side → launch → seconds


class FakeSide:
    """A side whose launches take the times of a table."""

    times: Times
    turns: list[str]  # the names of sides whose launches have ended
    codes: list[int]
    case: dict[str, dict[str, Any]]

    def __init__(
        self, variant: Variant, words: list[str], folder: Path, settings: list[str]
    ) -> None:
        self.variant, self.words, self.folder = variant, words, folder
        self.command = "python -m ddpbench collectives"
        folder.mkdir(parents=True)
        self._store(a_run())

    def measure_launch(self) -> None:
        name = self.variant.name
        self.turns.append(name)
        run, number = self.run(), self.turns.count(name) - 1
        result = a_result(
            a_case(**self.case.get(name, {})), number, a_summary(self.times[name](number))
        )
        self._store(replace(
            run, results=(*run.results, result), launches=(*run.launches, a_launch(number))
        ))  # fmt: skip
        if code := self.codes.pop(0) if self.codes else 0:
            raise Failed(self, "rank 1 has died", code)  # type: ignore[arg-type]

    def _store(self, run: Run) -> None:
        store.write(self.folder, replace(run, id=self.variant.name))

    def run(self) -> Run:
        return store.read(self.folder)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeSide]:
    """Fake sides in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0).normal(0, 0.002, 200)
    kind = type("Sides", (FakeSide,), {
        "turns": [], "codes": [], "case": {},
        "times": {"a": lambda n: float(1e-3 * np.exp(noise[n])),
                  "b": lambda n: float(1e-3 * np.exp(noise[n + 100]))},
    })  # fmt: skip
    monkeypatch.setattr(turns, "Side", kind)
    return kind


def called(*words: str) -> int:
    """Return the exit code of a command line."""
    try:
        return cli.main(list(words))
    except SystemExit as end:
        return int(str(end.code))


def test_it_stops_as_soon_as_the_verdict_is_settled(
    sides: type[FakeSide], capsys: pytest.CaptureFixture[str]
) -> None:
    """Identical sides are the SAME after six blocks of one launch per side. A random side begins
    each block. Both runs and the comparison are stored."""
    assert called("ab", "--a", "", "--b", "X=1", "--seed", "3", "--format", "json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["counts"] == {"SAME": 1}
    assert output["new"]["name"] == "b: X=1"
    blocks = list(zip(sides.turns[::2], sides.turns[1::2], strict=True))
    assert len(blocks) == 6
    assert set(blocks) == {("a", "b"), ("b", "a")}
    (folder,) = Path("results").glob("*-ab-*")
    assert called("show", str(folder)) == called("show", folder.name) == 0
    assert capsys.readouterr().out == 2 * (folder / "comparison.txt").read_text()
    assert {path.name for path in folder.iterdir()} == {
        "a", "b", "comparison.json", "comparison.txt"
    }  # fmt: skip


def test_an_open_verdict_goes_on_until_the_last_look(
    sides: type[FakeSide], capsys: pytest.CaptureFixture[str]
) -> None:
    """10 % is SLOWER after six blocks; else, it ends after 48 blocks at most."""
    plain = sides.times["b"]
    sides.times["b"] = lambda n: 1.1 * plain(n)
    assert called("ab", "--a", "", "--b", "X=1") == 1
    assert len(sides.turns) == 12
    sides.turns.clear()
    noise = np.random.default_rng(1).normal(0, 0.3, 100)
    sides.times["b"] = lambda n: float(1e-3 * np.exp(noise[n]))
    assert called("ab", "--a", "", "--b", "X=1", "--strict") == 2
    assert len(sides.turns) == 96
    assert "48 launches" in capsys.readouterr().out


def test_the_budget_ends_it_before_the_next_look(
    sides: type[FakeSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With launches of 10 s, 24 blocks take 480 s of 500, and 48 would take 960."""
    now = [0.0]
    noise = np.random.default_rng(1).normal(0, 0.3, 100)

    def slow(n: int) -> float:
        now[0] += 10
        return float(1e-3 * np.exp(noise[n]))

    sides.times = {"a": slow, "b": lambda n: slow(n + 50)}
    monkeypatch.setattr(ab.time, "monotonic", lambda: now[0])
    assert called("ab", "--a", "", "--b", "X=1", "--max-time", "500") == 0
    assert len(sides.turns) == 48


def test_what_cannot_be_compared_is_seen_after_one_block(
    sides: type[FakeSide], capsys: pytest.CaptureFixture[str]
) -> None:
    """Sides that measured different things: exit code 3, with the field."""
    sides.case = {"b": {"dtype": "float64"}}
    assert called("ab", "--a", "", "--b", "X=1") == 3
    assert len(sides.turns) == 2
    assert "dtype float32 → float64" in capsys.readouterr().out


def test_how_the_same_thing_is_done_may_be_varied(
    sides: type[FakeSide], capsys: pytest.CaptureFixture[str], frozen: Frozen
) -> None:
    """gloo against mpi can be compared here, and the row names the difference. `compare` refuses
    the same two runs."""
    sides.case = {"b": {"backend": "mpi", "provider": "mpi4py"}}
    words = ("--b", "--backend mpi", "--output", "out", "--format", "json")
    assert called("ab", "--a", "", *words) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["verdict"] == "SAME"
    frozen.text(row["why"])
    assert called("compare", "out/a", "out/b") == 3


def test_a_signal_ends_both_sides(sides: type[FakeSide]) -> None:
    """The batch system's signals do what Ctrl-C does."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}

    def warn(launch: int) -> float:
        signal.raise_signal(signal.SIGTERM)
        return 1e-3

    sides.times["b"] = warn
    try:
        assert called("ab", "--a", "", "--b", "X=1") == 130
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize(("code", "own"), [(2, 2), (130, 130), (-9, 5)])
def test_a_failure_keeps_its_exit_code_and_what_was_measured(
    sides: type[FakeSide], capsys: pytest.CaptureFixture[str], code: int, own: int
) -> None:
    """2, 4 and 130 are passed on; any other code means that the side died. What was measured before
    is shown and stays."""
    sides.codes = [0, 0, 0, 0, 0, 0, code]
    assert called("ab", "--a", "", "--b", "X=1", "--output", "out") == own
    out, err = capsys.readouterr()
    assert re.search(r"side [ab]: rank 1 ", err)
    assert "all_reduce" in out
    counts = [len(store.read(Path("out", name)).results) for name in ("a", "b")]
    assert sorted(counts) == [3, 4]


def test_a_side_whose_results_are_wrong_is_named(
    sides: type[FakeSide], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its launches end with 0, its run with 4, and ab with 4."""
    finding = Finding("error", "wrong-result", "rank 1 got 4, expected 3")

    def close(self: FakeSide) -> None:
        if self.variant.name == "b":
            store.write(self.folder, replace(self.run(), exit_code=4, findings=(finding,)))

    sides.close = close  # type: ignore[method-assign]
    assert called("ab", "--a", "", "--b", "X=1") == 4
    assert f"side b: {finding.sentence}. " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--a", ""],
        ["--a", "", "--b", "'"],
        ["--a", "", "--b", "--python /none"],
        ["--a", "", "--b", "", "--", "collectives", "--oops"],
        ["--a", "", "--b", "", "collectives", "--sizes", "4Q"],
        ["--a", "", "--b", "--launches 3"],
        ["--a", "", "--b", "", "ddp", "--workload", "linear", "--width", "3"],
        ["--a", "", "--b", "", "--output", "taken"],
    ],
    ids=shlex.join,
)
def test_what_is_wrong_is_refused_before_anything_starts(
    sides: type[FakeSide], capsys: pytest.CaptureFixture[str], words: list[str], frozen: Frozen
) -> None:
    """One sentence, exit code 2, and no folder."""
    Path("taken").mkdir()
    assert called("ab", *words) == 2
    err = capsys.readouterr().err
    assert ONE_SENTENCE.fullmatch(err)
    frozen.text(err)
    assert sides.turns == []
    assert not Path("results").exists()


def test_a_variant_is_environment_python_and_options() -> None:
    """In this order, quoted as in a shell."""
    found = parse_variant("a", f"X=1 Y='a b' --python {sys.executable} --op all_reduce")
    assert found == Variant("a", sys.executable, {"X": "1", "Y": "a b"}, ("--op", "all_reduce"))
    assert str(found) == "X=1 Y='a b' --op all_reduce"
    with pytest.raises(Refused, match="existing Python interpreter"):
        parse_variant("b", "--python")


SLOWED = """
import os, time
import torch.distributed as dist
plain = dist.all_reduce
def all_reduce(*arguments, **named):
    if os.environ.get("SLOWED"):
        time.sleep(0.005)
    return plain(*arguments, **named)
dist.all_reduce = all_reduce
"""


def make_environment(folder: Path, version: str) -> str:
    """Make a virtual environment with this ddpbench and a torch of this version; return its Python.

    Its torch is this one by links, except for the version. Other packages are those of this Python.
    """
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "ddpbench").symlink_to(ROOT / "ddpbench")
    (site / "rest.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    (site / "torch").mkdir()
    real = Path(torch.__file__).parent
    for path in real.iterdir():
        if path.name not in ("__init__.py", "version.py", "__pycache__"):
            (site / "torch" / path.name).symlink_to(path)
    shutil.copy2(real / "__init__.py", site / "torch")
    shutil.copytree(real / "__pycache__", site / "torch/__pycache__")  # compiling takes seconds
    text = Path(torch.version.__file__).read_text()
    (site / "torch/version.py").write_text(f"{text}\n__version__ = {version!r}\n")
    return str(folder / "bin/python")


@pytest.mark.thorough
def test_a_slower_side_is_found_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Real ranks, forked per launch; side b has its own torch, and each of its calls sleeps 5 ms.

    Nothing is left running. The launches of a block never measure at the same time.
    """
    new = make_environment(tmp_path / "new", "2.91.0")
    (tmp_path / "slowed.py").write_text(SLOWED)
    words = ("ab", "--a", "", "--b", f"SLOWED=1 --python {new}")
    measured = (
        "--max-time", "1", "--format", "json", "--output", "out",
        "collectives", "--backend", "gloo", "--op", "all_reduce", "--sizes", "4K",
        "--case-time", "0.2", "--peak-bandwidth", "100", "--import", "slowed", "-n", "2",
    )  # fmt: skip
    done = run_all_warm(tmp_path, *words, *measured)
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["verdict"] == "SLOWER"
    assert row["change"] > 1
    for name, version in (("a", torch.__version__), ("b", "2.91.0")):
        run = store.read(tmp_path / "out" / name)
        assert run.state == "complete"
        assert {launch.facts["torch"] for launch in run.launches} == {version}
        pids = {rank["pid"] for launch in run.launches for rank in launch.ranks}
        assert len(pids) == 12
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    sides = {name: store.read_samples(tmp_path / "out" / name) for name in ("a", "b")}
    stamps = pd.concat([samples.assign(side=name) for name, samples in sides.items()])
    for _, block in stamps[stamps["rank"] == 0].groupby("launch"):
        block = block.sort_values("entry_ns")
        assert (block["entry_ns"].to_numpy()[1:] >= block["exit_ns"].to_numpy()[:-1]).all()
