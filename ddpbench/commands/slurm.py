"""A Slurm job that measures: its batch script is written and submitted, what it measures lands in
results/ of this directory.

python -m ddpbench slurm -N2 -n4 --time=20
python -m ddpbench slurm -N2 --gres=gpu:8 -- ddp --workload transformer
python -m ddpbench slurm --wait -n4 -- collectives --op all_reduce --sizes 4:1M:x4

Before `--` stand sbatch's own options. After it: collectives or ddp, and options of that one;
options without a name go to both, and without any words both run as they are. Where no number of
tasks is given it is two a node; with --gres=gpu… or --gpus… one a GPU, and CUDA is measured.
With sbatch's --wait the command lasts as long as the job and ends with its exit code.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpbench.launch.placement import Refused
from ddpbench.nested.command_line import IN_RANKS, MEASURING, check
from ddpbench.records import redact

GROUP = "measure"
HELP = "submit a Slurm job that measures"
PASSES_ON = True  # its words are for sbatch
RESULTS = Path("results")
GPUS = r"(?<!\S)(-G|--gpus|--gres[= ]\S*gpu)"
TASKS = r"(?<!\S)(-n|--ntasks|--gpus-per-task)"
SCRIPT = """\
#!/bin/bash
# Made by: python -m ddpbench slurm {words}
# Once more: sbatch {given} results/slurm-$SLURM_JOB_ID.sh
#SBATCH --job-name=ddpbench
#SBATCH --output=results/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@30
{tasks}
# Half a minute before the time is over Slurm tells the ranks, which then store what they have. This
# shell waits for them, whatever it is told itself, since Slurm ends a job with its script.
trap : TERM USR1
{environment}
if [[ -n ${{SLURM_CPUS_PER_TASK:-}} ]]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun no longer takes it from the job by itself
fi

status=0
measure() {{
  local code=0
  ((status < 128)) || return 0 # ended by a signal: there is no time for more
  # In a session of its own: srun takes a SIGTERM to the script as an order to kill the ranks.
  setsid srun --export=ALL{srun} {python} -m ddpbench."$@" || code=$?
  ((code <= status)) || status=$code
}}
{measured}
exit "$status"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own: sbatch and the measuring commands read the words."""
    parser.usage = "%(prog)s [sbatch options] [-- [collectives|ddp] [options]]"


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Submit the job, tell where its results will be; sbatch's exit code, 2 if it refuses.

    Raises Refused where there is no sbatch, or for words that a rank would refuse.
    """
    given, asked = split(words)
    commands = wanted(asked)
    if shutil.which("sbatch") is None:
        raise Refused(
            "there is no sbatch in PATH: type this where Slurm jobs are submitted; ranks on this "
            "host alone need no Slurm: python -m ddpbench collectives -n 2"
        )
    try:
        RESULTS.mkdir(exist_ok=True)
    except OSError as error:
        raise Refused(
            f"results/ cannot be made here ({error.strerror}): go to a directory that you can "
            "write and that all nodes see"
        ) from None
    return submit(script(words, given, commands), given, [command for command, *_ in commands])


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """sbatch's words, and ddpbench's. Raises Refused where the `--` between them is missing."""
    given = list(words)
    asked = given[given.index("--") + 1 :] if "--" in given else []
    given = given[: given.index("--")] if "--" in given else given
    for name in IN_RANKS:
        if name in given:
            raise Refused(
                f"{name} and its options stand behind --, before it sbatch's: "
                f"python -m ddpbench slurm -N2 -- {name} …"
            )
    return given, asked


def wanted(asked: Sequence[str]) -> list[list[str]]:
    """The commands of the job, each a name and its options, which are checked here already: the
    job may have to wait for days. Ends with exit code 2 and one sentence for what is wrong."""
    if asked and asked[0] in IN_RANKS:
        commands = [list(asked)]
    elif asked and not asked[0].startswith("-"):
        raise Refused(f"{asked[0]!r} is not one of {', '.join(IN_RANKS)}")
    else:
        commands = [[name, *asked] for name in MEASURING]
    for command in commands:
        options = check(command)
        if options.output is not None and len(commands) > 1:
            raise Refused("--output is the folder of one run: write -- collectives or -- ddp first")
        if options.nproc is not None:
            raise Refused("Slurm starts the ranks: give -n before the --, to sbatch")
    return commands


def script(words: Sequence[str], given: Sequence[str], commands: Sequence[Sequence[str]]) -> str:
    """The batch script: each command in a step of srun, with this Python and this ddpbench."""
    line = " ".join(given)
    gpus, tasks = re.search(GPUS, line), re.search(TASKS, line)
    device = "cuda" if gpus else "cpu"
    default = "--ntasks-per-gpu=1" if gpus else "--ntasks-per-node=2"
    paths = os.environ.get("PYTHONPATH")
    return SCRIPT.format(
        words=shlex.join(redact.arguments(words)).replace("\n", " "),  # stays a comment
        given=shlex.join(redact.arguments(given)).replace("\n", " "),
        tasks="" if tasks else f"#SBATCH {default}\n",
        environment=f"export PYTHONPATH={shlex.quote(paths)}" if paths else "",
        srun=" --gpu-bind=none" if gpus else "",  # ranks of a node reach each other's GPUs
        python=shlex.quote(sys.executable),
        measured="\n".join(
            f"measure {name} {shlex.join(['--device', device, *options])}"
            for name, *options in commands
        ),
    )


def submit(text: str, given: Sequence[str], names: Sequence[str]) -> int:
    """Give the script to sbatch, and keep it; sbatch's exit code, 2 if it took no job."""
    sbatch = subprocess.Popen(
        ["sbatch", "--parsable", *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="surrogateescape",  # as the command line came
    )
    assert sbatch.stdin is not None
    assert sbatch.stdout is not None
    sbatch.stdin.write(text)
    sbatch.stdin.close()
    job = sbatch.stdout.readline().strip().partition(";")[0]
    if not job:  # it has told why; or it was --test-only
        return 2 if sbatch.wait() else 0
    kept = RESULTS / f"slurm-{job}.sh"
    kept.touch(mode=0o600)  # it runs as it stands: what is secret in the options is in it
    kept.write_text(text, encoding="utf-8", errors="surrogateescape")
    output = RESULTS / f"slurm-{job}.out"
    sys.stdout.write(
        f"job {job}: {', then '.join(names)}\n"
        f"its output:   {output}; follow it with tail -F {output}\n"
        "its results:  a folder each in results/: python -m ddpbench list\n"
        f"to end it:    scancel {job} (what it has measured by then is kept)\n"
    )
    sys.stdout.flush()
    return sbatch.wait()
