"""The version of NCCL, or of RCCL on AMD, that this process uses. Importing it loads no torch."""

from __future__ import annotations

import ctypes
import os
import pwd
import re
from typing import Any

from ddpbench.runtime.cpu import or_none, read

CONF_OF_HOST = "/etc/nccl.conf"
PLUGIN = re.compile(r"/lib[nr]ccl-[^/\s]+\.so[^/\s]*")


def describe_version() -> str | None:
    """Return "2.30.7", or "2.29.7 (as built)" of torch if none is loaded; None without NCCL.

    Opening the library by name could load a second copy, with another version.
    """
    import torch

    number = ctypes.c_int()
    for name in ("librccl.so.1", "librccl.so") if _is_rccl() else ("libnccl.so.2",):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
            if library.ncclGetVersion(ctypes.byref(number)) == 0:
                code = number.value
                return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
        except (OSError, AttributeError):
            continue
    built: Any = getattr(torch.cuda, "nccl", None)
    version = or_none(lambda: built.version()[:3])  # torch may have been built without NCCL
    return version and f"{'.'.join(map(str, version))} (as built)"


def describe() -> str:
    """Return the library's name and version."""
    return f"{'RCCL' if _is_rccl() else 'NCCL'} {describe_version() or 'of unknown version'}"


def plugins() -> str | None:
    """Return the names of the plug-ins that this process has loaded; None without NCCL."""
    mapped = read("/proc/self/maps") or ""
    if not re.search(r"/lib[nr]ccl\.so", mapped):
        return None
    return ", ".join(sorted({name[1:] for name in PLUGIN.findall(mapped)})) or "none"


def read_conf_files() -> dict[str, dict[str, str]]:
    """Return the settings in the files that NCCL reads, by file; an earlier file wins.

    NCCL reads NCCL_CONF_FILE, else ~/.nccl.conf, then /etc/nccl.conf. They may contain secrets.
    """
    home = or_none(lambda: pwd.getpwuid(os.getuid()).pw_dir)  # as NCCL does, without HOME
    chosen = os.environ.get("NCCL_CONF_FILE") or (home and f"{home}/.nccl.conf")
    files: dict[str, dict[str, str]] = {}
    for file in filter(None, (chosen, CONF_OF_HOST)):
        if (text := read(file)) is not None:
            settings = files.setdefault(file, {})
            for line in text.splitlines():
                name, equals, value = line.partition("=")
                if equals and not line.startswith("#"):
                    settings.setdefault(name, value)  # the first setting of a name counts
    return files


def _is_rccl() -> bool:
    import torch

    return bool(torch.version.hip)
