"""ddpbench: what PyTorch's collectives and a DDP step cost, and which rank or link is to blame."""

from typing import TYPE_CHECKING, Any

from ddpbench.version import VERSION

if TYPE_CHECKING:
    from ddpbench.commands.show import load
    from ddpbench.hang.guard import watchdog
    from ddpbench.replicas import Report, Verifier, verify_replicas
    from ddpbench.watch.api import watch

__version__ = VERSION
__all__ = [
    "Report",
    "Verifier",
    "__version__",
    "load",
    "verify_replicas",
    "watch",
    "watchdog",
]


def __getattr__(name: str) -> Any:
    """What a user's program calls, imported when it is asked for: most of it needs torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "watchdog":
        from ddpbench.hang import guard

        return guard.watchdog
    if name == "load":
        from ddpbench.commands import show

        return show.load
    if name == "watch":
        from importlib import import_module

        return import_module("ddpbench.watch")  # a package that can be called
    from ddpbench import replicas

    return getattr(replicas, name)
