"""The launches of a run: what their refusals and failures make of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_lines import QUICK
from frozen import Frozen
from rank_pool import RankPool
from stored_runs import a_result, a_run

from ddpbench import cli, collectives
from ddpbench.catalog import backends
from ddpbench.nested_runs import command_line
from ddpbench.records import store
from ddpbench.runtime import control
from ddpbench.session import launches
from ddpbench.session.options import RunOptions, resolve


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({"gloo": 0, "gloo2": 2, "gloo3": 0}, 2),
        ({"gloo": 0, "gloo2": 2, "gloo3": 5}, 5),
        ({"gloo": 0, "gloo2": 5, "gloo3": 2}, 5),
        ({"gloo": 2, "gloo2": 2, "gloo3": 2}, 2),
    ],
)
def test_a_refused_backend_is_a_refusal_and_a_dead_rank_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], expected: int
) -> None:
    """Exit code 2 if a backend was refused, 5 if a rank died; what the others measured stays, in a
    run that is marked; a run in which nothing was measured is removed."""

    def launch(
        options: RunOptions, measure: Callable[..., int], words: Sequence[str]
    ) -> tuple[int, str]:
        (name,) = options.backend
        if codes[name] == 0:
            folder, measured = Path(str(options.join)), a_run(a_result())
            parts = {"launches": measured.launches, "results": measured.results}
            store.write(folder, replace(store.read(folder), **parts))
        return codes[name], ""

    for name in ("gloo2", "gloo3"):
        fake = replace(backends.BACKENDS["gloo"], name=name)
        monkeypatch.setitem(backends.BACKENDS, name, fake)
    monkeypatch.setattr(launches, "_start_ranks", launch)
    words = ["collectives", "-n", "2", "--backend", "gloo,gloo2,gloo3", "--launches", "1"]
    output = tmp_path / "run"
    assert cli.main([*words, "--device", "cpu", "--output", str(output)]) == expected
    assert output.exists() == (0 in codes.values())
    if output.exists():
        run = store.read(output)
        assert (run.state, run.exit_code) == ("failed", expected)


@pytest.mark.parametrize(("count", "code"), [("3", 2), ("2", 0)])
def test_a_number_of_ranks_that_the_launcher_contradicts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    frozen: Frozen,
    count: str,
    code: int,
) -> None:
    """-n under a launcher is its number of ranks, or one sentence and exit code 2."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launches, "run_rank", lambda options, placement, measure: 0)
    assert cli.main(["collectives", "-n", count, "--backend", "gloo", "--device", "cpu"]) == code
    frozen.text(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [(["--device", "cpu"], 2), (["--device", "cuda"], 3), (["--device", "cuda", "-n", "5"], 5)],
)
def test_there_is_a_rank_for_each_gpu(
    monkeypatch: pytest.MonkeyPatch, words: list[str], ranks: int
) -> None:
    """Unless the user names a number; on the CPU there are two."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(backends, "choose", lambda names, device, launcher: names)
    options = collectives.Options.of(command_line.parse(["collectives", *words]))
    assert resolve(options, None).ranks == ranks


def test_a_rank_that_alone_sees_no_gpu_is_named(frozen: Frozen) -> None:
    """Nobody has typed --backend gloo there: `auto` has taken it, because of the device."""
    ranks = [{"backend": ["nccl"], "device": "cuda"}, {"backend": ["gloo"], "device": "cpu"}]
    frozen.text(str(control.find_differing_option([ranks[0], ranks[0], ranks[1]])))


REFUSED_BACKEND = """
from dataclasses import replace
from ddpbench.catalog import backends
backends.BACKENDS["gloo2"] = replace(backends.BACKENDS["gloo"], name="gloo2", size=lambda: 3)
"""


@pytest.mark.parametrize("names", ["gloo,gloo2", "gloo2,gloo"])
def test_a_backend_refused_under_a_launcher_keeps_and_marks_what_others_measured(
    pool: RankPool, tmp_path: Path, names: str
) -> None:
    """Under a launcher, a refusal of the second backend marks the run as failed and shows what the
    first one measured; if nothing was measured, the run is removed."""
    (tmp_path / "refused_backend.py").write_text(REFUSED_BACKEND)
    words = ("--import", "refused_backend", "--backend", names, "--op", "barrier", *QUICK)
    done = pool.call(1, tmp_path, "collectives", "--device", "cpu", *words, "--output", "run")
    (refusal,) = re.findall(r"^ddpbench: (gloo2 .*3, not 1): ", done.stderr, re.MULTILINE)
    assert (tmp_path / "run").exists() == bool(done.stdout) == (names == "gloo,gloo2")
    if done.stdout:
        run = store.read(tmp_path / "run")
        assert (run.state, run.exit_code, len(run.results)) == ("failed", 2, 1)
        assert refusal in str(run.state_reason)
