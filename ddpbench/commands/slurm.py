"""Submit a Slurm job that measures. Its results appear in results/ of this directory.

python -m ddpbench slurm -N2 -n4 --time=20
python -m ddpbench slurm -N2 --gres=gpu:8 -- ddp --workload transformer
python -m ddpbench slurm --wait -n4 -- collectives --op all_reduce --sizes 4:1M:x4

Write sbatch's own options before `--`. After it, write collectives, ddp or doctor with its options.
Options without a command go to collectives and ddp, which both run by default. The default is two
tasks per node, or one per GPU with --gres=gpu… or --gpus…, which measure CUDA tensors. With
sbatch's --wait the command waits for the job and ends with its exit code.
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
from ddpbench.nested_runs.command_line import IN_RANKS, MEASURING, check
from ddpbench.records import redact
from ddpbench.records.wording import explain_unknown

GROUP = "measure"
HELP = "submit a Slurm job that measures"
PASSES_ON = True  # its words are for sbatch
RESULTS = Path("results")
GPUS = r"(?<!\S)(-G|--gpus|--(gres|tres-per-task)[= ]\S*gpu)"
TASKS = r"(?<!\S)(-n|--ntasks|--gpus-per-task|--tres-per-task)"
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
    """Add no options: sbatch and the measuring commands read the words."""
    parser.usage = "%(prog)s [sbatch options] [-- [collectives|ddp|doctor] [options]]"


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Submit the job, print where its results will be; return sbatch's exit code, 2 if it refuses.

    Raises Refused if there is no sbatch, or for words that a rank would refuse.
    """
    sbatch_words, own_words = split(words)
    commands = read_commands(own_words)
    if shutil.which("sbatch") is None:
        raise Refused(
            "sbatch is not in PATH: type this where Slurm jobs are submitted; ranks on this host "
            "alone need no Slurm: python -m ddpbench collectives -n 2"
        )
    try:
        RESULTS.mkdir(exist_ok=True)
    except OSError as error:
        raise Refused(
            f"results/ cannot be created here ({error.strerror}): change to a directory that you "
            "can write and that all nodes see"
        ) from None
    text = script(words, sbatch_words, commands)
    return submit(text, sbatch_words, [command for command, *_ in commands])


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return sbatch's words and ddpbench's. Raises Refused if the `--` between them is missing."""
    end = words.index("--") if "--" in words else len(words)
    sbatch_words, own_words = list(words[:end]), list(words[end + 1 :])
    for name in IN_RANKS:
        if name in sbatch_words:
            raise Refused(
                f"write {name} and its options after --, and sbatch's options before it: "
                f"python -m ddpbench slurm -N2 -- {name} …"
            )
    return sbatch_words, own_words


def read_commands(words: Sequence[str]) -> list[list[str]]:
    """Return the commands of the job, each a name and its options, all checked.

    They are checked now, because the job may wait for days. Raises Refused, or ends the process
    with exit code 2 and one sentence.
    """
    if words and words[0] in IN_RANKS:
        commands = [list(words)]
    elif words and not words[0].startswith("-"):
        raise Refused(explain_unknown("command", words[0], IN_RANKS))
    else:
        commands = [[name, *words] for name in MEASURING]
    for command in commands:
        options = check(command)
        if options.output is not None and len(commands) > 1:
            raise Refused("--output is the folder of one run: write -- collectives or -- ddp first")
        if options.nproc is not None:
            raise Refused("Slurm starts the ranks: give -n before the --, to sbatch")
    return commands


def script(
    words: Sequence[str], sbatch_words: Sequence[str], commands: Sequence[Sequence[str]]
) -> str:
    """Return the batch script: each command is a step of srun, with this Python and ddpbench."""
    line = " ".join(sbatch_words)
    gpus, tasks = re.search(GPUS, line), re.search(TASKS, line)
    device = "cuda" if gpus else "cpu"
    default = "--ntasks-per-gpu=1" if gpus else "--ntasks-per-node=2"
    paths = os.environ.get("PYTHONPATH")
    return SCRIPT.format(
        words=shlex.join(redact.arguments(words)).replace("\n", " "),  # stays a comment
        given=shlex.join(redact.arguments(sbatch_words)).replace("\n", " "),
        tasks="" if tasks else f"#SBATCH {default}\n",
        environment=f"export PYTHONPATH={shlex.quote(paths)}" if paths else "",
        srun=" --gpu-bind=none" if gpus else "",  # ranks of a node reach each other's GPUs
        python=shlex.quote(sys.executable),
        measured="\n".join(
            f"measure {name} {shlex.join(['--device', device, *options])}"
            for name, *options in commands
        ),
    )


def submit(text: str, sbatch_words: Sequence[str], names: Sequence[str]) -> int:
    """Give the script to sbatch, and keep a copy; return the exit code, 2 if it took no job."""
    sbatch = subprocess.Popen(
        ["sbatch", "--parsable", *sbatch_words],
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
    if not job:  # sbatch has printed why, or it was --test-only
        return 2 if sbatch.wait() else 0
    kept = RESULTS / f"slurm-{job}.sh"
    kept.touch(mode=0o600)  # the options in it may hold a secret
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
