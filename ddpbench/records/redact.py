"""What a run, a table or a message must not show: secrets, user names, home folders.

Everything that is stored, read or printed passes through here. Host names stay: they name the
culprit.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

HIDDEN = "***"
# Of a variable, an option or a part of a query string: HF_TOKEN, --api-key, X-Amz-Signature. Not
# --key-averages, tokenizer, author.
NAMES = re.compile(
    r"passw(or)?d|passphrase|secret|credential|api_?key|"
    r"(?<![a-z])(pwd|passwd|jwt|cookies?|auth|authorization|sig|signature)(?![a-z])|"
    r"token(?![a-z])|auth_?key|(?<![a-z])(access|private|signing)?keys?([-_]?id)?$|"
    r"(?-i:(?<![A-Z])KEYS?(?![A-Z]))",
    re.IGNORECASE,
)
# Of a value, whatever its name is. A digit is asked for where words of a language would fit.
VALUES = re.compile(
    r"\b(AKIA|ASIA)[A-Z0-9]{12,}|\bgh[pousr]_\w{10,}|\bgithub_pat_\w{10,}|\bglpat-[\w-]{10,}|"
    r"\bhf_(?=[A-Za-z]*\d)[A-Za-z0-9]{10,}|\b(sk|pk|rk)-(?=[\w-]*\d)[\w-]{10,}|\bxox[a-z]-[\w-]{8,}|"
    r"\bAIza[\w-]{20,}|\beyJ[\w-]{6,}\.[\w-]+(\.[\w-]*)?|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|$)"
)
ASSIGNED = re.compile(r"(?<![\w.%-])([-\w.%]+)(=)(\"[^\"]*\"|'[^']*'|[^\s,;&\"']+)")
TOLD = re.compile(
    r"(\b(?:password|passwd|secret|token)[\"']?:\s*[\"']?|\bauthorization:\s*\w+\s+|"
    r"\bbearer\s+)[^\s\"',}]{6,}",
    re.IGNORECASE,
)
USERINFO = re.compile(
    r"(?<=://)[^/\s\"'@]+(/[^/\s\"'@]+)?@|(?<![^\s=,'\"])[^\s:/@=]+:[^\s:/@]+@(?=\w)"
)
HOMES = re.compile(r"((?<![/.~])(/[\w.-]+){1,2})?/(home|Users)/[^/\s:,;'\"()]+")
# These name no person; some are words that every run contains.
NOBODY = frozenset((
    "root", "user", "admin", "nobody", "daemon", "test", "tests", "build", "builder", "runner",
    "jenkins", "docker", "ubuntu", "debian", "centos", "fedora", "ec2-user", "azureuser",
    "vagrant", "vscode", "jovyan", "mambauser", "python", "torch", "pytorch", "nccl", "gloo",
    "mpiuser", "openmpi", "mpich", "slurm", "ddpbench", "bench", "collectives", "doctor",
    "workspace", "train", "model", "data", "results", "home", "host", "rank", "ranks",
))  # fmt: skip
SHORTEST_NAME, SHORTEST_SECRET, LONGEST_WORD = 4, 8, 15
# What a record has under these keys is its identity, or names a host: it stays as it is.
KEPT = frozenset((
    "id", "case", "plan", "operations", "backends", "backend", "provider", "launcher", "library",
    "code", "hostname", "host", "boot_id", "kernel", "cpu_model", "gpu_name", "gpu_uuid",
    "git_revision",
))  # fmt: skip


@dataclass(frozen=True)
class Owner:
    """Whose process this is: user names, home folder, the values of secret variables; hosts whose
    names may contain a user's."""

    users: tuple[str, ...] = ()
    home: str = ""
    secrets: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, variables: Mapping[str, str], user: str = "", host: str = "") -> Owner:
        """As a process's environment tells it."""
        home = variables.get("HOME", "").rstrip("/")
        names = {user, Path(home).name if HOMES.fullmatch(home) else ""}
        names |= {variables.get(each, "") for each in ("USER", "LOGNAME", "SUDO_USER")}
        users = {name for name in names if len(name) >= SHORTEST_NAME and name not in NOBODY}
        values = {value for name, value in variables.items() if _is_secret(name, value)}
        longest_first = sorted(values, key=lambda value: (-len(value), value))
        return cls(tuple(sorted(users)), home, tuple(longest_first), (host,))


def owner() -> Owner:
    """That of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container may run as a number without a name
        user = ""
    return Owner.of(os.environ, user, socket.gethostname())


def is_secret_name(name: str) -> bool:
    """Whether a variable or an option of this name is to be hidden."""
    return NAMES.search(name) is not None


def text(shown: str, whose: Owner | None = None) -> str:
    """A text without secrets, home folders and the user's name.

    whose: None for this process's.
    """
    return _text(shown, owner() if whose is None else whose)


def message(shown: str) -> str:
    """A text for the user's own terminal: a name in a path stays, or it could not be typed."""
    return text(shown, replace(owner(), users=()))


@lru_cache(maxsize=8192)  # a record has few texts, most of them many times
def _text(shown: str, whose: Owner) -> str:
    for value in whose.secrets:
        shown = shown.replace(value, HIDDEN)
    shown = USERINFO.sub(HIDDEN + "@", VALUES.sub(HIDDEN, shown))
    shown = TOLD.sub(rf"\1{HIDDEN}", ASSIGNED.sub(_assigned, shown))
    if len(whose.home) > 1:
        shown = re.sub(rf"(?<![\w.-]){re.escape(whose.home)}(?![\w.-])", "~", shown)
    shown = HOMES.sub("~", shown)
    for name in whose.users:
        if name in shown:
            shown = _without_user(shown, name, whose.hosts)
    return shown


def arguments(line: Sequence[str], whose: Owner | None = None) -> list[str]:
    """The words of a command line; the value of a secret option may be the next word."""
    whose = owner() if whose is None else whose
    found, hides = [], False
    for word in line:
        found.append(HIDDEN if hides and not word.startswith("--") else text(word, whose))
        hides = word.startswith("--") and "=" not in word and is_secret_name(word)
    return found


def record(data: dict[str, Any], whose: Owner | None = None) -> dict[str, Any]:
    """A run as JSON has it. What identifies its cases and hosts is kept."""
    whose = owner() if whose is None else whose
    return dict(_walked(data, replace(whose, hosts=(*whose.hosts, *_hosts(data)))))


def _walked(value: Any, whose: Owner) -> Any:
    if isinstance(value, str):
        return text(value, whose)
    if isinstance(value, (list, tuple)):
        return [_walked(each, whose) for each in value]
    if isinstance(value, dict):
        found = {}
        for name, each in value.items():
            if name == "command_line" and isinstance(each, (list, tuple)):
                found[name] = arguments([str(word) for word in each], whose)
            else:
                found[name] = each if name in KEPT else _walked(each, whose)
        return found
    return value


def _hosts(data: dict[str, Any]) -> tuple[str, ...]:
    """The names of hosts in a record; a damaged one may have none."""
    found: set[str] = set()
    launches = data.get("launches")
    for launch in launches if isinstance(launches, (list, tuple)) else ():
        ranks = launch.get("ranks") if isinstance(launch, dict) else None
        for rank in ranks if isinstance(ranks, (list, tuple)) else ():
            found.add(str(rank.get("hostname") or "") if isinstance(rank, dict) else "")
    return tuple(sorted(found - {""}))


def _is_secret(name: str, value: str) -> bool:
    """Whether the value of a variable is to be hidden wherever it occurs: not what may be a word, a
    number or a path."""
    word = len(value) <= LONGEST_WORD and re.search(r"\d", value) is None
    number = re.search(r"[A-Za-z]", value) is None
    if word or number or value.startswith("/"):
        return False
    return len(value) >= SHORTEST_SECRET and is_secret_name(name)


def _assigned(found: re.Match[str]) -> str:
    name, equals, value = found.groups()
    return f"{name}{equals}" + (HIDDEN if is_secret_name(name) else ASSIGNED.sub(_assigned, value))


def _without_user(shown: str, name: str, hosts: Sequence[str]) -> str:
    """The text without a user's name, but for where it is a part of a host's."""
    kept = [re.escape(host) for host in hosts if name in host]
    user = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
    return re.sub(
        "|".join([*(f"({host})" for host in kept), user]),
        lambda found: found[0] if found.lastindex else "USER",
        shown,
    )
