"""Runs on disk: written in one step, read back unchanged, refused in one sentence if damaged."""

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_lines import run_command
from frozen import Frozen
from stored_runs import a_case, a_launch, a_result, a_run, a_summary, sample_columns
from stored_steps import a_step_result
from warm_python import warm_python

from ddpbench.records import codec, store
from ddpbench.records.schema import Finding, Limit, Run, Wrong

# --- the codec ------------------------------------------------------------------------------------


def full_run() -> Run:
    """A run in which every field differs from its default."""
    result = a_result(
        wrong=(Wrong(1, -1, 7, "3", "nan"),), limit=Limit(1e9, "memcpy"), others_share=0.25,
        hard_limit=Limit(2e9, "nominal"), measuring_seconds=1.5, wall_seconds=2.5, calls=2,
    )  # fmt: skip
    skipped = replace(result, summary=None, reason="not supported: µ “quoted”\n", wrong=())
    return a_run(
        result, skipped, a_result(a_case(reduce_op=None, root=1), summary=a_summary(width=None)),
        findings=(Finding("error", "wrong-result", "Ein Satz – ja.", "weiter", {"rank": 1}),),
        ended="2026-01-01T00:01:00Z", state="failed", state_reason="rank 1 died", exit_code=5,
    )  # fmt: skip


def test_unknown_fields_are_left_out_and_absent_ones_get_their_default() -> None:
    """Unknown fields are ignored and absent ones get their default, so that a slightly older or
    newer ddpbench of the same schema can be read."""
    run = full_run()
    raw = json.loads(codec.encode(run))
    raw["invented"] = raw["results"][0]["invented"] = 1
    del raw["findings"], raw["results"][0]["wall_seconds"]
    first = replace(run.results[0], wall_seconds=0.0)
    assert codec.decode(Run, raw) == replace(run, findings=(), results=(first, *run.results[1:]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_nan_or_infinity_is_stored(value: float) -> None:
    """A run with NaN or infinity is not written, since JSON has neither."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        codec.encode(Limit(value, "x"))


# --- one folder a run -----------------------------------------------------------------------------


def test_a_run_that_was_written_is_read_again(tmp_path: Path) -> None:
    """A run that was created and written is read back equal; its id is its folder's name."""
    folder = store.create(tmp_path / "mine", full_run(), "label")
    assert folder == tmp_path / "mine"
    assert store.read(folder) == replace(full_run(), id="mine")
    store.write(folder, a_run(id="other"))
    assert store.read(folder) == a_run(id="other")
    assert [path.name for path in folder.iterdir()] == ["run.json"]


READ_AT_ONCE = """
import sys, threading
from pathlib import Path
from ddpbench.records import store

def read():
    together.wait()
    store.read(Path(sys.argv[1]))

sys.setswitchinterval(1e-5)
together = threading.Barrier(4)
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_several_threads_may_be_the_first_to_read_a_run(tmp_path: Path) -> None:
    """msgspec then inspects the types of a run, and must not do so in two threads at once."""
    folder = store.create(tmp_path / "mine", full_run(), "label")
    done = run_command([*warm_python(), "-c", READ_AT_ONCE, str(folder)], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_grows_by_lines(tmp_path: Path, frozen: Frozen) -> None:
    """Appended launches and outcomes are read in order after those in run.json. A line that is not
    complete yet is ignored, and nothing is read twice."""

    store.create(tmp_path, a_run(), "")
    store.append(tmp_path, {"launches": asdict(a_launch(0))})
    store.append(tmp_path, {"number": 0, "results": asdict(a_result())})
    store.append(tmp_path, {"launches": asdict(replace(a_launch(0), cases=7))})
    store.append(tmp_path, {"number": 1, "steps": asdict(a_step_result())})
    with (tmp_path / store.GROWING).open("ab") as file:
        file.write(b'{"number": 2, "resu')
    run = store.read(tmp_path)
    assert (run.results, run.steps) == ((a_result(),), (a_step_result(),))
    assert [launch.cases for launch in run.launches] == [7]
    store.write(tmp_path, run)  # as a rank does that marks it, while the rest goes on
    assert store.read(tmp_path) == run
    (tmp_path / store.GROWING).write_bytes(b'{"number": 2}\n')
    with pytest.raises(store.InvalidRun) as caught:
        store.read(tmp_path)
    frozen.text(str(caught.value).replace(str(tmp_path), "FOLDER"))


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """A write that fails, here onto a folder, leaves no temporary file."""
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        store.replace_file(tmp_path / "run.json", b"{}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_only_the_first_end_of_a_run_is_kept(tmp_path: Path) -> None:
    """The first close marks a running run and returns it; a second close changes nothing."""
    store.create(tmp_path, a_run(state="running", exit_code=None), "label")
    first = store.close(tmp_path, "interrupted", "by Ctrl-C", 130)
    assert (first.state, first.state_reason, first.exit_code) == ("interrupted", "by Ctrl-C", 130)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first.ended or "")
    assert store.close(tmp_path, "failed", "later", 5) == first == store.read(tmp_path)


# --- finding a run --------------------------------------------------------------------------------


def create_run(name: str, started: str) -> None:
    """Store a run in results/."""
    store.create(Path("results") / name, a_run(started=started), "x")


def test_a_run_is_found_by_path_by_name_and_as_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is found by its folder, by its run.json, by its name in results/ or results/reference/,
    and as `last`."""
    monkeypatch.chdir(tmp_path)
    create_run("20260101T000000Z-a", "2026-01-01T00:00:00Z")
    create_run("20260102T000000Z-b", "2026-01-02T00:00:00Z")
    create_run("reference/old", "2025-01-01T00:00:00Z")
    first, second = Path("results/20260101T000000Z-a"), Path("results/20260102T000000Z-b")
    assert store.find(str(first)) == store.find(f"{first}/run.json") == first
    assert store.find(str(tmp_path / first)) == tmp_path / first
    assert store.find("20260101T000000Z-a") == first
    assert store.find("old") == Path("results/reference/old")
    assert store.find("last") == second
    assert store.list_runs() == [first, second]


# --- damage ---------------------------------------------------------------------------------------

DAMAGE = {
    "NaN": ('"exit_code": 5', '"exit_code": NaN'),
    "wrong type": ('"exit_code": 5', '"exit_code": "5"'),
    "half a character": ("rank 1 died", r"rank \ud800"),
    "nested beyond the stack": ('"place": {', f'"place": {{"x": {"[" * 10**5}'),
    "not UTF-8": ("rank 1 died", "rank \udcff"),
    "cut": ('"exit_code"', ""),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_one_sentence(tmp_path: Path, name: str, frozen: Frozen) -> None:
    """Impossible numbers, half characters and deep nesting are refused in one sentence."""
    old, new = DAMAGE[name]
    text = codec.encode(full_run()).decode()
    text = text.replace(old, new) if new else text.partition(old)[0]
    assert text != codec.encode(full_run()).decode()
    (tmp_path / "run.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(store.InvalidRun) as raised:
        store.read(tmp_path)
    assert "\n" not in str(raised.value)
    frozen.text(str(raised.value).replace(str(tmp_path), "FOLDER"))


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO, a device, a folder or a link loop in place of run.json is refused without waiting,
    and does not hide the sound run beside it from `last`."""
    monkeypatch.chdir(tmp_path)
    create_run("sound", "2026-01-01T00:00:00Z")
    folders = {
        "fifo": lambda path: os.mkfifo(path),
        "device": lambda path: path.symlink_to("/dev/zero"),
        "folder": lambda path: path.mkdir(),
        "loop": lambda path: path.symlink_to(path),
    }
    for name, make_it in folders.items():
        (tmp_path / "results" / name).mkdir()
        make_it(tmp_path / "results" / name / "run.json")
    for name in folders:
        with pytest.raises(store.InvalidRun, match=f"^results/{name} contains no run: "):
            store.read(store.find(name))
    assert store.find("last").name == "sound"


@pytest.mark.parametrize("size", [0, 3, 100])
def test_damaged_samples_are_an_invalid_run(tmp_path: Path, size: int) -> None:
    """A cut file of samples is refused as an invalid run, not with an error of pyarrow."""
    store.add_samples(tmp_path, 0, sample_columns("a", 0, 4, seed=0))
    store.join_samples(tmp_path)
    path = tmp_path / "samples.parquet"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(store.InvalidRun, match=re.escape(str(tmp_path))):
        store.read_samples(tmp_path)


# --- raw samples ----------------------------------------------------------------------------------


def test_samples_are_the_same_before_and_after_joining(tmp_path: Path) -> None:
    """Parts stored in any order read as one frame, value for value and type for type, before and
    after they become one file; then the parts are gone."""
    parts = [sample_columns(f"case {n % 3}", n // 3, 3 + n, seed=n) for n in range(12)]
    for number in (3, 0, 11, 10, 1, 2, 4, 5, 6, 7, 8, 9):
        store.add_samples(tmp_path, number, parts[number])
    before = store.read_samples(tmp_path)
    store.join_samples(tmp_path)
    after = store.read_samples(tmp_path)
    pd.testing.assert_frame_equal(before, after)
    assert tuple(after.columns) == store.SAMPLE_COLUMNS
    for name in store.SAMPLE_COLUMNS:
        wanted = [value for part in parts for value in np.asarray(part[name]).tolist()]
        assert after[name].tolist() == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["samples.parquet"]


def test_a_part_that_was_not_finished_is_not_read(tmp_path: Path) -> None:
    """A part that a crash left half written is ignored. Without parts the frame is empty."""
    assert tuple(store.read_samples(tmp_path).columns) == store.SAMPLE_COLUMNS
    store.add_samples(tmp_path, 0, sample_columns("a", 0, 4, seed=0))
    (tmp_path / "samples.parts/.part-00001").write_bytes(b"PAR1 half")
    (tmp_path / ".samples.parquet").write_bytes(b"PAR1 half")
    assert len(store.read_samples(tmp_path)) == 4
    store.join_samples(tmp_path)
    assert len(store.read_samples(tmp_path)) == 4
