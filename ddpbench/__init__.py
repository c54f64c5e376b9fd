"""ddpbench: what PyTorch's collectives and a DDP step cost, and which rank or link is to blame."""

from typing import TYPE_CHECKING, Any

from ddpbench.version import VERSION

if TYPE_CHECKING:
    from ddpbench.hang.guard import watchdog
    from ddpbench.replicas import Report, Verifier, verify_replicas
    from ddpbench.watch.api import watch

__version__ = VERSION
__all__ = [
    "Report",
    "Verifier",
    "__version__",
    "verify_replicas",
    "watch",
    "watchdog",
]


def __getattr__(name: str) -> Any:
    """What a user's training script calls, imported when it is asked for: it needs torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "watchdog":
        from ddpbench.hang import guard

        return guard.watchdog
    if name == "watch":
        from importlib import import_module

        return import_module("ddpbench.watch")  # a package that can be called
    from ddpbench import replicas

    return getattr(replicas, name)
