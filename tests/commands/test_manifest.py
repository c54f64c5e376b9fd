"""The Kubernetes manifests, against what the published schemas of both kinds ask for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import assert_refused, clean_environment

from ddpbench import cli


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `manifest` prints, as Kubernetes reads it."""
    assert cli.main(["manifest", *words]) == 0
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return found


COMMAND = ["torchrun", "-m", "ddpbench.collectives", "--output", "/tmp/ddpbench"]


@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_a_pytorchjob_has_what_the_operator_asks_for(
    capsys: pytest.CaptureFixture[str], nodes: int
) -> None:
    """kubeflow.org/v1: replica specs Master (exactly one) and Worker, each with a container of the
    name `pytorch` and an image; nprocPerNode is a string; the rest of the nodes are workers."""
    job = printed(capsys, "--nodes", str(nodes), "--ranks-per-node", "8", "--image", "r.io/x:1")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"] == "ddpbench"
    assert job["spec"]["nprocPerNode"] == "8"
    assert set(job["spec"]) <= {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs", "elasticPolicy"}
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {
        "Master": 1, "Worker": nodes - 1,
    }  # fmt: skip
    for each in replicas.values():
        assert set(each) == {"replicas", "restartPolicy", "template"}
        assert each["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        assert each["template"]["spec"]["containers"] == [
            {"name": "pytorch", "image": "r.io/x:1", "command": COMMAND}
        ]


def test_a_trainjob_has_what_trainer_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    """trainer.kubeflow.org/v1alpha1: runtimeRef.name is required; numNodes and numProcPerNode are
    whole numbers; none of torchrun's own PET_ variables is set."""
    job = printed(
        capsys, "--kind", "trainjob", "--nodes", "3", "--ranks-per-node", "4", "--", "ddp",
        "--workload", "mlp",
    )  # fmt: skip
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"]["name"] == "ddpbench"
    assert job["spec"] == {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": "ddpbench:latest", "numNodes": 3, "numProcPerNode": 4,
            "command": [*COMMAND[:2], "ddpbench.ddp", *COMMAND[3:], "--workload", "mlp"],
        },
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_words_stay_what_they_are(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Quotes, colons, dollars and comments in image or options are text; it is said that no cluster
    has seen the manifest."""
    image, output = 'a: "b" # $c', "x: $HOME 'y'"
    assert (
        cli.main(["manifest", "--kind", kind, "--image", image, "--", "ddp", "--output", output])
        == 0
    )
    text = capsys.readouterr().out
    assert "Not tested on a cluster" in text
    job = yaml.safe_load(text)["spec"]
    found = job["trainer"] if kind == "trainjob" else None
    if found is None:
        (found,) = job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert found["image"] == image
    assert found["command"][-1] == output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "0"], "--nodes: '0' is not a whole number from 1 on"),
        (["--kind", "job"], "--kind: unknown choice 'job'"),
        (["--", "show"], "unknown command 'show' after --: choose collectives, ddp or doctor"),
        (["--", "ddp", "--batches", "3"], "unknown option --batches"),
    ],
)
def test_what_cannot_run_is_refused(
    capfd: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    """One sentence, exit code 2."""
    try:
        code = cli.main(["manifest", *words])
    except SystemExit as end:
        code = int(str(end.code))
    said = capfd.readouterr()
    assert_refused(subprocess.CompletedProcess([], code, said.out, said.err), sentence)


def test_it_is_printed_from_any_folder_without_torch(tmp_path: Path) -> None:
    """The files come with the package; nothing heavy is imported."""
    block = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; "
        "from ddpbench.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", block, "manifest"], cwd=tmp_path, env=clean_environment(),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["kind"] == "PyTorchJob"
