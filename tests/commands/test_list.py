"""`list --case`: which cases of which runs it prints, and what it refuses."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import ONE_SENTENCE
from frozen import Frozen
from in_process import Call
from stored_runs import a_case, a_result, a_run, a_summary, launch_results
from stored_steps import a_step_case, a_step_result, a_step_run
from without_torch import RUN_DDPBENCH, run_without_torch

from ddpbench.commands.list import split_words
from ddpbench.present.case_labels import name_case
from ddpbench.records import store
from ddpbench.records.schema import Run, Wrong


def put(day: int, run: Run, folder: str = "results") -> None:
    """A run of this day of January; its name does not sort like its day."""
    place = Path(folder) / f"run-{50 - day}"
    place.mkdir(parents=True)
    store.write(place, replace(run, id=place.name, started=f"2026-01-{day:02}T00:00:00Z"))


def rows(out: str) -> list[list[str]]:
    """The cells of a table below its heading and its rule."""
    return [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()[2:]]


@pytest.mark.parametrize(
    ("text", "case", "found"),
    [
        ("all_reduce,4K,gloo", a_case(), True),
        ("GLOO all_reduce 4 KiB", a_case(), True),
        ("reduce", a_case(), False),
        ("2K", a_case(), False),
        ("2 ranks,float32", a_case(), True),
        ("1MiB", a_case(nbytes=2**24), False),
        ("16M", a_case(nbytes=2**24), True),
        ("1 B", a_case(nbytes=1), True),
        ("root 0 in place", a_case(root=0), True),
        ("mlp width=1024", a_step_case(), True),
        ("batch 64 mlp", a_step_case(), True),
        ("batch 2", a_step_case(), False),
    ],
)
def test_all_words_must_stand_in_the_name(text: str, case: Any, found: bool) -> None:
    """Whole words, in any order; a number and its unit are one."""
    assert (split_words(text) <= split_words(name_case(case))) == found


def test_a_case_has_a_line_per_run_the_oldest_first(call: Call) -> None:
    """Its time, its interval over six launches, its flags, and how the run ended; a run without the
    case, and one that only tried it, have no line."""
    wrong = a_result(wrong=(Wrong(1, 3, 7, "3", "nan"),))
    put(1, a_run(*launch_results(2e-3, None, 6, 0.001)))
    put(2, a_run(wrong, state="interrupted"))
    put(3, a_run(a_result(a_case(nbytes=8192, count=2048))))
    put(4, a_run(replace(a_result(), summary=None, reason="not supported")))
    code, out, err = call("--case", "all_reduce,4K")
    assert (code, err) == (0, "")
    name = "all_reduce 4 KiB float32 sum in place 2 ranks"
    first, second = rows(out)
    assert first[:3] == ["run-49", name, "gloo"]
    assert re.fullmatch(r"(2000|199\d|200\d) µs", first[3])
    assert re.fullmatch(r"±0\.\d%", first[4])
    assert first[-1] == "complete"
    assert second == ["run-48", name, "gloo", "1000 µs", "±1.0%", "WRONG", "interrupted"]


def test_a_step_is_a_case_too(call: Call) -> None:
    """In ms; FOLDER names other runs, and a run that cannot be read is reported."""
    put(1, a_run(a_result()))
    put(2, a_step_run(a_step_result(a_step_case(), 0)), "nightly")
    bad = Path("nightly/bad")
    bad.mkdir()
    (bad / "run.json").write_text("{")
    code, out, err = call("nightly", "--case", "mlp,gloo")
    assert code == 0
    assert re.fullmatch(r"[\d.]+ ms", rows(out)[0][3])
    assert ONE_SENTENCE.fullmatch(err)
    assert "nightly/bad/run.json" in err


@pytest.mark.parametrize(("text", "code"), [((",",), 2), ((), 2), (("all_redcue,4K",), 0)], ids=str)
def test_nothing_to_list_is_one_sentence(
    call: Call, text: tuple[str, ...], code: int, frozen: Frozen
) -> None:
    """A wrong request exits with 2; no such case with 0, as without any run."""
    put(1, a_run(a_result()))
    got, out, err = call("--case", *text)
    assert (got, out) == (code, "")
    assert ONE_SENTENCE.fullmatch(err)
    frozen.text(err)


def test_a_case_is_listed_without_torch(call: Call) -> None:
    """The command works where importing torch fails."""
    put(1, a_run(a_result(summary=a_summary(2e-3))))
    assert "2000 µs" in run_without_torch(RUN_DDPBENCH, "list", "--case", "all_reduce")
