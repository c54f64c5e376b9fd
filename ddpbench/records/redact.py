"""Remove secrets, user names and home folders from records and messages.

Runs are redacted when they are stored, and messages when they are printed. Host names stay, because
the reader needs them to find the faulty host.
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
# Names of variables, options and parts of a query string with a secret value: HF_TOKEN, --api-key,
# X-Amz-Signature; but not --key-averages, tokenizer or author.
NAMES = re.compile(
    r"passw(or)?d|passphrase|secret|credential|api_?key|"
    r"(?<![a-z])(pwd|passwd|jwt|cookies?|auth|authorization|sig|signature)(?![a-z])|"
    r"token(?![a-z])|auth_?key|(?<![a-z])(access|private|signing)?keys?([-_]?id)?$|"
    r"(?-i:(?<![A-Z])KEYS?(?![A-Z]))",
    re.IGNORECASE,
)
# Values that are secret under any name. A digit is required where plain words would match.
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
# User names that do not identify a person; some are words that every run contains.
NOBODY = re.compile(
    r"root|user|admin|nobody|daemon|test|tests|build|builder|runner|jenkins|docker|ubuntu|debian|"
    r"centos|fedora|ec2-user|azureuser|vagrant|vscode|jovyan|mambauser|python|torch|pytorch|nccl|"
    r"gloo|mpiuser|openmpi|mpich|slurm|ddpbench|bench|collectives|doctor|workspace|train|model|data|"
    r"results|home|host|rank|ranks"
)
SHORTEST_NAME, SHORTEST_SECRET, LONGEST_WORD = 4, 8, 15
# The values of these keys identify a case or a host, so they stay.
KEPT = (
    *("id", "case", "plan", "operations", "backends", "backend", "provider", "launcher", "library"),
    *("code", "hostname", "host", "boot_id", "kernel", "cpu_model", "gpu_name", "gpu_uuid"),
    "git_revision",
)


@dataclass(frozen=True)
class Owner:
    """The owner of a process: user names, home folder and the values of secret variables.

    hosts: names that stay, even if they contain the user's name.
    """

    users: tuple[str, ...] = ()
    home: str = ""
    secrets: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, variables: Mapping[str, str], user: str = "", host: str = "") -> Owner:
        """Read the owner from a process's environment."""
        home = variables.get("HOME", "").rstrip("/")
        names = {user, Path(home).name if HOMES.fullmatch(home) else ""}
        names |= {variables.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
        users = {
            name for name in names if len(name) >= SHORTEST_NAME and not NOBODY.fullmatch(name)
        }
        values = {value for name, value in variables.items() if _is_secret(name, value)}
        longest_first = sorted(values, key=lambda value: (-len(value), value))
        return cls(tuple(sorted(users)), home, tuple(longest_first), (host,))


def owner() -> Owner:
    """Return the owner of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container may run as a number without a name
        user = ""
    return Owner.of(os.environ, user, socket.gethostname())


def is_secret_name(name: str) -> bool:
    """Return whether a variable or an option of this name has a secret value."""
    return NAMES.search(name) is not None


def text(shown: str, whose: Owner | None = None) -> str:
    """Remove secrets, home folders and the user's name from a text.

    whose: the owner to hide; None: the owner of this process.
    """
    return _text(shown, owner() if whose is None else whose)


def message(shown: str) -> str:
    """Redact a text for the user's own terminal. User names stay, so that paths can be typed."""
    return text(shown, replace(owner(), users=()))


@lru_cache(maxsize=8192)  # a record repeats few texts many times
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
    """Redact the arguments of a command line; the value of a secret option may follow it."""
    whose = owner() if whose is None else whose
    redacted, hide_next = [], False
    for argument in line:
        is_option = argument.startswith("--")
        redacted.append(HIDDEN if hide_next and not is_option else text(argument, whose))
        hide_next = is_option and "=" not in argument and is_secret_name(argument)
    return redacted


def record(data: dict[str, Any], whose: Owner | None = None) -> dict[str, Any]:
    """Redact a run as JSON has it, except the identities of its cases and hosts."""
    whose = owner() if whose is None else whose
    ranks = [rank for launch in _list_launches(data) for rank in launch["ranks"]]
    hosts = {str(rank.get("hostname") or "") for rank in ranks} - {""}
    return dict(_redact(data, replace(whose, hosts=(*whose.hosts, *sorted(hosts)))))


def _list_launches(data: dict[str, Any]) -> Sequence[Any]:
    """Return the launches of a run, or the one of a line of a running run."""
    launches = data.get("launches", ())
    return [launches] if isinstance(launches, dict) else launches


def _redact(value: Any, whose: Owner, key: str = "") -> Any:
    if key in KEPT:
        return value
    if isinstance(value, str):
        return text(value, whose)
    if isinstance(value, (list, tuple)):
        if key == "command_line":
            return arguments([str(word) for word in value], whose)
        return [_redact(item, whose) for item in value]
    if isinstance(value, dict):
        return {name: _redact(item, whose, name) for name, item in value.items()}
    return value


def _is_secret(name: str, value: str) -> bool:
    """Return whether to hide the value of a variable wherever it occurs.

    Values that may be a word, a number or a path are not hidden.
    """
    word = len(value) <= LONGEST_WORD and re.search(r"\d", value) is None
    number = re.search(r"[A-Za-z]", value) is None
    if word or number or value.startswith("/"):
        return False
    return len(value) >= SHORTEST_SECRET and is_secret_name(name)


def _assigned(match: re.Match[str]) -> str:
    name, equals, value = match.groups()
    return f"{name}{equals}" + (HIDDEN if is_secret_name(name) else ASSIGNED.sub(_assigned, value))


def _without_user(shown: str, name: str, hosts: Sequence[str]) -> str:
    """Hide a user's name, except where it is part of a host's name."""
    kept = [re.escape(host) for host in hosts if name in host]
    user = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
    return re.sub(
        "|".join([*(f"({host})" for host in kept), user]),
        lambda match: match[0] if match.lastindex else "USER",
        shown,
    )
