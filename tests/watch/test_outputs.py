"""Outputs of rank 0: the line, the table, the stored run, metrics, the callback."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from frozen import Frozen
from synthetic_rounds import Fault, Job

from ddpbench.launch.placement import free_port
from ddpbench.present.formats import show
from ddpbench.records import store
from ddpbench.records.schema import Finding, Run
from ddpbench.records.store import End
from ddpbench.records.watched import COLUMNS
from ddpbench.watch.judging.history import History
from ddpbench.watch.outputs import Outputs, Settings
from ddpbench.watch.stored import identify_job
from ddpbench.watch.window import JoinedCall, Window

COMPLETE = End("complete", None, 0)
LATE = {"rank": 2, "host": "b", "token": "hf_abcdefgh1234567890"}
SLOW = Finding("warning", "straggler", "rank 2 on host b loses 20 ms", "look at b", LATE)
NOTE = Finding("note", "exposed-communication", "5 ms of each step is exposed communication")
LINK = Finding("warning", "slow-link", "the link from a to b is slow", "", {"hosts": ["a", "b"]})


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line of a job."""
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "--epochs", "3"])


def open_outputs(**settings: Any) -> Outputs:
    """The outputs of a job of four ranks on gloo, before its first report."""
    return Outputs(Settings(**settings), identify_job(0, "gloo", 4))


def a_history(steps: int = 60) -> History:
    """A job of so many steps, in which rank 2 is the last in each of its newest calls."""
    hosts, faults = {"a": [0, 1], "b": [2, 3]}, [Fault(2, "backward", 0.02)]
    history = Job(hosts, faults, noise=0.01, spikes=0.0).watch(steps)
    calls = [
        JoinedCall("world", i, "allreduce", 2**20, i, 0, 10**6, 20 * 10**6, 2, 4)
        for i in range(steps)
    ]
    history.add(Window(0, history.hosts, 0, calls=calls))
    return history


def the_run(results: Path) -> Run:
    """The only run in a folder."""
    (folder,) = store.list_runs(results)
    return store.read(folder)


def test_a_run_is_stored_after_every_round(tmp_path: Path) -> None:
    """After each update the folder holds the job so far, marked as running, with the worst finding
    first; at the end it holds how the job ended, and its table."""
    outputs = open_outputs(output=tmp_path)
    for steps in (60, 120):
        history = a_history(steps)
        outputs.update(history, [NOTE, SLOW])
        run = the_run(tmp_path)
        assert (run.command, run.state, run.exit_code) == ("watch", "running", None)
        watched = run.steps[0].watched
        assert watched is not None
        assert watched.last_step == steps - 1
    assert [finding.code for finding in run.findings] == [SLOW.code, NOTE.code]
    outputs.finish(history, [SLOW], End("failed", "rank 0 ended with KeyError", 1))
    run = the_run(tmp_path)
    assert run.steps[0].case.ranks_per_host == (2, 2)
    assert [rank["hostname"] for rank in run.launches[0].ranks] == ["a", "a", "b", "b"]
    assert (run.state, run.exit_code) == ("failed", 1)
    assert f"PARTIAL (failed): {run.state_reason}\n" in show("table", run)
    assert sorted(path.name for path in (tmp_path / run.id).iterdir()) == ["run.json", "table.txt"]


def test_the_record_does_not_grow(tmp_path: Path) -> None:
    """The record of a long job is never more than 150 kB."""
    open_outputs(output=tmp_path).update(a_history(7200), [SLOW])
    assert (tmp_path / the_run(tmp_path).id / "run.json").stat().st_size < 150_000


def test_no_secret_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an argument of the script nor a finding brings a secret into the record, while the
    job goes on and at its end."""
    secret = "hf_abcdefgh1234567890"
    monkeypatch.setenv("HF_TOKEN", secret)
    sys.argv[1:] = ["--api-key", "sk-123456789012345", f"--hub={secret}"]
    outputs = open_outputs(output=tmp_path)
    for add in (outputs.update, partial(outputs.finish, end=COMPLETE)):
        add(a_history(), [SLOW])
        text = (tmp_path / the_run(tmp_path).id / "run.json").read_text()
        assert secret not in text
        assert "sk-1234" not in text
        assert '"rank"' in text


def test_a_folder_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line says why nothing is stored; the table is printed all the same, to stderr."""
    (tmp_path / "file").touch()
    outputs = open_outputs(output=tmp_path / "file")
    outputs.update(a_history(), [])
    outputs.finish(a_history(), [], COMPLETE)
    out, err = capfd.readouterr()
    assert (out, err.count(str(tmp_path / "file"))) == ("", 1)
    assert "part of a step" in err
    assert "stored in" not in err


def test_a_job_without_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has no stderr, and no steps either, is stored; nothing is raised."""
    monkeypatch.setattr(sys, "stderr", None)
    open_outputs(output=tmp_path).finish(History(), [SLOW], COMPLETE)
    assert the_run(tmp_path).state == "complete"


def test_the_callback_gets_each_report_until_it_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """on_report gets every round as JSON, with the documented keys. Its exception is reported once;
    it is called no more, the run is stored, and the table printed."""
    reports: list[dict[str, Any]] = []

    def receive(report: dict[str, Any]) -> None:
        reports.append(report)
        if len(reports) == 2:
            raise KeyError("loss")

    outputs = open_outputs(output=tmp_path, on_report=receive)
    outputs.update(History(), [])
    for _ in range(2):
        outputs.update(a_history(), [SLOW])
    outputs.finish(a_history(), [SLOW], COMPLETE)
    first, second = json.loads(json.dumps(reports))
    assert (first["step"], first["seconds"]) == (None, {})
    assert (second["step"], second["state"]) == (59, "running")
    assert set(second["seconds"]) == {"step", "exposed", *COLUMNS}
    assert second["seconds"]["backward"] == pytest.approx(0.06, rel=0.05)
    assert second["findings"][0]["place"]["rank"] == 2
    err = capfd.readouterr().err
    assert err.count("KeyError: 'loss'\n") == 1
    assert "part of a step" in err
    assert the_run(tmp_path).state == "complete"


def test_metrics_on_a_port(capfd: pytest.CaptureFixture[str]) -> None:
    """The port serves the newest report in base units, with one series per part and single ranks
    only where a finding names them, until the job ends. A second job on the same port goes on."""
    parser, port = pytest.importorskip("prometheus_client.parser"), free_port()
    outputs = open_outputs(prometheus=port)
    outputs.update(a_history(), [SLOW, NOTE, SLOW, LINK])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
    shown = {each.name: [(one.labels, one.value) for one in each.samples] for each in families}
    assert shown["ddpbench_watch_last_step"] == [({}, 59)]
    seconds = {labels["part"]: value for labels, value in shown["ddpbench_watch_seconds"]}
    assert seconds["backward"] == pytest.approx(0.06, rel=0.05)
    assert set(seconds) == {"step", "exposed", *COLUMNS}
    found = sorted((one["rank"], one["host"]) for one, _ in shown["ddpbench_watch_finding"])
    assert found == [("", ""), ("", "a,b"), ("2", "b")]
    open_outputs(prometheus=port).update(a_history(), [])
    assert capfd.readouterr().err.count("Prometheus") == 1
    outputs.finish(a_history(), [], COMPLETE)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_without_prometheus_client(
    frozen: Frozen, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sentence says what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    open_outputs(prometheus=9400).update(a_history(), [])
    frozen.text(capfd.readouterr().err)
