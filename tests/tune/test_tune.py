"""ddpbench tune in real process groups, and the settings that it lists."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import read_stored_run, run_ddpbench
from frozen import Frozen
from rank_pool import RankPool

from ddpbench.session.options import Parser
from ddpbench.tune import command
from ddpbench.tune.settings import KINDS, Base, list_settings

SMALL = (
    "tune", "--backend", "gloo", "--width", "64", "--depth", "2", "--batch", "8",
    "--case-time", "0.05",
)  # fmt: skip


def a_base(*words: str, **other: Any) -> Base:
    parser = Parser(prog="ddpbench tune")
    command.add_arguments(parser)
    options = command.Options.of(parser.parse_args([*words]))
    base = Base(options, parameter_nbytes=20 * 2**20, has_buffers=False, threads=1, cores=4)
    return replace(base, **other)


@pytest.mark.parametrize(
    ("kinds", "words", "other", "settings"),
    [
        (["buckets"], [], {}, [("bucket_cap_mb", size) for size in (1.0, 4.0, 16.0, 20.0)]),
        (["buckets"], [], {"parameter_nbytes": 9}, [("bucket_cap_mb", 1.0)]),
        (["buckets"], ["--bucket-cap-mb", "1"], {"parameter_nbytes": 2**21},
         [("bucket_cap_mb", 2.0), ("bucket_cap_mb", None)]),
        (["options"], [], {}, [("gradient_as_bucket_view", True), ("static_graph", True)]),
        (["options"], ["--static-graph"], {"has_buffers": True},
         [("gradient_as_bucket_view", True), ("static_graph", False),
          ("broadcast_buffers", False)]),
        (["options"], ["--accumulate", "2"], {}, [("gradient_as_bucket_view", True)]),
        (["accumulate"], ["--accumulate", "2"], {}, [("accumulate", n) for n in (1, 4, 8)]),
        (["threads"], [], {}, [("threads", 2), ("threads", 4)]),
    ],
)  # fmt: skip
def test_settings_differ_from_the_default(
    kinds: list[str], words: list[str], other: dict[str, Any], settings: list[tuple[str, Any]]
) -> None:
    first, *rest = list_settings(tuple(kinds), a_base(*words, **other))
    assert first == {}
    assert rest == [dict([setting]) for setting in settings]


@pytest.mark.thorough
def test_settings_are_measured_and_judged(tmp_path: Path, pool: RankPool) -> None:
    """All blocks are measured and decide. Replicas are compared in each visit; a hook that gloo
    cannot run is skipped with the reason; the parts of a bucket make its wire."""
    words = ("--what", "buckets,hooks")
    done = pool.call(2, tmp_path, *SMALL, *words)
    assert done.returncode == 0, done.stderr
    run = read_stored_run(tmp_path)[1]
    codes = [found.code for found in run.findings]
    assert "faster-setting" in codes or "keep-defaults" in codes
    assert "skipped comm_hook=powersgd: on gloo it hangs" in done.stdout
    measured = [result for result in run.steps if result.summary is not None]
    assert all(result.replicas is not None and result.replicas.ok for result in measured)
    assert len({result.block for result in measured}) >= 7
    (bucket, *_) = next(r.summary.buckets for r in measured if r.summary and r.summary.buckets)
    assert bucket.alone is not None
    assert bucket.queue is not None
    assert bucket.contention is not None
    assert bucket.unexplained is not None
    parts = (bucket.alone, bucket.queue, bucket.contention, bucket.unexplained)
    assert sum(part.value for part in parts) == pytest.approx(bucket.wire.value, rel=0.5)


def test_the_time_is_bounded(tmp_path: Path, pool: RankPool) -> None:
    """With no time left, each setting is measured once, and nothing is decided."""
    words = (*SMALL, "--max-time", "0.001", "--what", "options", "--format", "json")
    done = pool.call(2, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert [step["block"] for step in run["steps"]] == [0, 0, 0]
    assert "undecided" in [found["code"] for found in run["findings"]]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--parallel", "fsdp"], "leave out --parallel fsdp"),
        (["--rounds", "3"], "--rounds does not apply to tune"),
        (["--what", "bucket"], "Did you mean buckets?"),
    ],
)
def test_what_tune_cannot_do_is_one_sentence(
    tmp_path: Path, frozen: Frozen, words: list[str], sentence: str
) -> None:
    done = run_ddpbench(tmp_path, "tune", "-n", "2", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    frozen.text(done.stderr)
    assert not (tmp_path / "results").exists()


def test_help_lists_each_kind(tmp_path: Path) -> None:
    done = run_ddpbench(tmp_path, "tune", "--help")
    text = " ".join(done.stdout.split())
    assert all(f"{name}: {kind.help}" in text for name, kind in KINDS.items())
