"""What is hidden wherever something is stored or printed, and what must stay readable."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from command_lines import clean_environment
from frozen import Frozen
from patience import PATIENCE_SECONDS
from stored_runs import a_launch, a_run
from warm_python import warm_python

from ddpbench.nested_runs import turns
from ddpbench.records import redact, store
from ddpbench.records.redact import Owner

ALICE = Owner.of(
    {
        "USER": "alicewonder", "HOME": "/scratch/people/alicewonder", "MY_API_KEY": "pl4nted-value",
        "MAX_TOKENS": "1048576", "AUTH_MODE": "disabled", "XAUTHORITY": "/run/user/1/auth9",
    },
    host="alicewonder-laptop",
)  # fmt: skip

SECRETS = {
    "AWS_SECRET_ACCESS_KEY=abc": "AWS_SECRET_ACCESS_KEY=***",
    "SSH_KEY_B64=abc DAOS_AUTHKEY=abc": "SSH_KEY_B64=*** DAOS_AUTHKEY=***",
    "PGPASSWORD='a b' x": "PGPASSWORD=*** x",
    "--api-key=abc --a=HF_TOKEN=xyz": "--api-key=*** --a=HF_TOKEN=***",
    "key AKIAIOSFODNN7EXAMPLE.": "key ***.",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a": "***",
    "hf_abcd1234efgh5678 sk-abcd-1234-efgh": "*** ***",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjft": "***",
    "https://bob:hunter2@proxy:3128/x": "https://***@proxy:3128/x",
    "tcp://bob:hun/ter2@host1:29500": "tcp://***@host1:29500",
    "s3://b/k?X-Amz-Signature=ab12&X-Amz-Credential=AK/1&x=1": (
        "s3://b/k?X-Amz-Signature=***&X-Amz-Credential=***&x=1"
    ),
    "cannot resolve bob:hunter2@host1, where": "cannot resolve ***@host1, where",
    "https://a.blob/c?sv=1&sig=aB%2F1&se=2": "https://a.blob/c?sv=1&sig=***&se=2",
    "x?token=hunter2&y=1": "x?token=***&y=1",
    "Authorization: Bearer abc.def-123": "Authorization: Bearer ***",
    "it said pl4nted-value": "it said ***",
    "/scratch/people/alicewonder/topo.xml": "~/topo.xml",
    "/home/bob/x:/usr/bin:/Users/carol/bin": "~/x:/usr/bin:~/bin",
    "-I/nfs/home/bob/include file:///home/bob/meet": "-I~/include file://~/meet",
    "job-of-alicewonder on alicewonder-laptop": "job-of-USER on alicewonder-laptop",
}


@pytest.mark.parametrize(("text", "shown"), SECRETS.items())
def test_secrets_names_and_homes_are_hidden(text: str, shown: str) -> None:
    """By the name of what is assigned, by the look of the value, or because a secret variable of
    this process has it; and what is hidden once stays as it is."""
    assert redact.text(text, ALICE) == shown
    assert redact.text(shown, ALICE) == shown


@pytest.mark.parametrize(
    "text",
    [
        "NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^docker,lo MASTER_ADDR=10.0.0.1",
        "--key-averages=3 NCCL_IB_PKEY=0",
        "tokenizer=fast max_tokens=4096 monkey=1 author=x keyboard=us", "--bucket-cap-mb=25",
        "9b2c3f0e1d9b2c3f0e1d9b2c3f0e1d9b2c3f0e1d", "GPU-3f0e1d9b-2c3f-4e1d-9b2c-3f0e1d9b2c3f",
        "1048576 bytes, disabled", "task-1-disk-22-x", "/homework/x /var/home", "malicewonderX",
        "tcp://10.0.0.1:29500 file:///tmp/meet", "all_reduce/tensor/gloo/cpu/float32/sum/4096/out",
        "a rank must start without a password: ask another user", "0-3,8 10.77.0.1/24 signal=9",
        "results/20261122T050750Z-collectives-gloo-w2-host1",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    """Settings, sizes, revisions, identities, addresses and ordinary words."""
    assert redact.text(text, ALICE) == text


def test_a_user_called_like_a_word_hides_no_word() -> None:
    """Service accounts and short names name nobody; their home folders still go."""
    for name in ("root", "mpiuser", "gloo", "lo", "test"):
        owner = Owner.of({"USER": name, "HOME": f"/home/{name}"})
        assert redact.text(f"--backend {name} /home/{name}/x", owner) == f"--backend {name} ~/x"


def test_the_next_word_may_be_the_secret() -> None:
    """`--api-key VALUE` in two words of a command line, but no option that follows."""
    line = ["ddp", "--api-key", "abc", "--token", "--quiet", "--key-averages", "3"]
    shown = ["ddp", "--api-key", "***", "--token", "--quiet", "--key-averages", "3"]
    assert redact.arguments(line, ALICE) == shown


def test_a_stored_run_is_clean(tmp_path: Path) -> None:
    """What is stored hides secrets and homes; hosts and identities stay."""
    facts = {"hostname": "home-of-bob", "variables": {"NCCL_TOPO_FILE": "/home/bob/topo.xml"}}
    words = ("ddpbench", "collectives", "--output", "tcp://u:hunter2@h:1")
    store.write(tmp_path, a_run(command_line=words, launches=(a_launch(ranks=(facts,)),)))
    read = store.read(tmp_path)
    assert read.command_line[-1] == "tcp://***@h:1"
    cleaned = {"hostname": "home-of-bob", "variables": {"NCCL_TOPO_FILE": "~/topo.xml"}}
    assert read.launches[0].ranks == (cleaned,)


def test_a_side_of_an_ab_is_shown_without_its_secrets(frozen: Frozen) -> None:
    frozen.text(str(turns.parse_variant("a", "HF_TOKEN=abc1 OMP_NUM_THREADS=1 --api-key x1")))


# --- a whole run ----------------------------------------------------------------------------------

PLANTED = {
    "name": "qwertzuser", "token": "pl4ntedtoken", "password": "pl4ntedpass",
    "signature": "pl4ntedsig", "key": "AKIAPL4NTEDKEY12345",
}  # fmt: skip


def leaks(text: str) -> list[str]:
    """What was planted and is there."""
    return [name for name, value in PLANTED.items() if value in text]


@pytest.mark.thorough
def test_nothing_that_was_planted_is_found_again(tmp_path: Path) -> None:
    """User, home folder, secret variables, a URL with a password, a signed one and a key: none is
    in a file of the runs, nor in what any command prints of them; NCCL's settings and the host
    are."""
    home = tmp_path / "home" / PLANTED["name"]
    home.mkdir(parents=True)
    environ = clean_environment(
        HOME=str(home), USER=PLANTED["name"], LOGNAME=PLANTED["name"],
        HF_TOKEN=PLANTED["token"], NCCL_NET_TOKEN=PLANTED["token"], NCCL_DEBUG="WARN",
        NCCL_TOPO_FILE=f"{home}/topo.xml", GLOO_PROXY=f"http://u:{PLANTED['password']}@proxy:1",
        TORCH_HUB_URL=f"https://b/k?x=1&X-Amz-Signature={PLANTED['signature']}",
        NCCL_COMMENT=f"{PLANTED['token']} {PLANTED['key']} of {PLANTED['name']}",
    )  # fmt: skip
    printed = []

    def ddpbench(*words: str, code: int | None = 0) -> str:
        done = subprocess.run(
            [*warm_python(), "-m", "ddpbench", *words], cwd=home, env=environ, text=True,
            capture_output=True, timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        assert code is None or done.returncode == code, done
        printed.append(done.stdout + done.stderr)
        return printed[-1]

    small = ("--op", "all_reduce", "--sizes", "4K", "--case-time", "0.05", "--backend", "gloo",
             "-n", "2", "--launches", "1", "--peak-bandwidth", "1000")  # fmt: skip
    ddpbench("collectives", *small, "--output", f"{home}/one")
    ddpbench("doctor", "preflight", "-n", "2", "--backend", "gloo", code=None)
    for form in ("table", "json", "csv"):
        ddpbench("show", f"{home}/one", "--format", form, code=None)
    ddpbench("list", str(home), code=None)
    ddpbench("compare", f"{home}/one", f"{home}/none", code=3)
    ddpbench("collectives", f"--api-key={PLANTED['token']}", code=2)
    files = sorted(path for path in home.rglob("*") if path.is_file())
    printed += [path.read_bytes().decode(errors="replace") for path in files]
    assert [leaks(text) for text in printed if leaks(text)] == []
    run = store.read(home / "one")
    variables = run.launches[0].ranks[0]["variables"]
    assert variables["NCCL_DEBUG"] == "WARN"
    assert variables["NCCL_TOPO_FILE"] == "~/topo.xml"
    assert variables["NCCL_COMMENT"] == "*** *** of USER"
    assert run.launches[0].ranks[0]["hostname"] == os.uname().nodename
    assert "~/one" in run.command_line
