"""Benchmark and diagnose PyTorch distributed training. For the manual, run `ddpbench guide`.

ddpbench.watchdog(timeout=300)        name the rank that causes a hang, and end the job
ddpbench.watch()                      report where the time of each training step goes
ddpbench.Verifier(model, optimizer)   prove in a training loop that all replicas are equal
ddpbench.verify_replicas(model)       prove it once; returns a Report
ddpbench.load("last")                 read a stored run as a pandas.DataFrame

Call the first four in every rank. Importing ddpbench does not import torch. `import ddpbench.mpi`
registers the backend "mpi4py". Read the arguments of a function with `help(ddpbench.watchdog)`.
"""

from importlib import import_module
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
_MODULES = {"load": "commands.show", "watch": "watch", "watchdog": "hang.guard"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because most of them need torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'replicas')}")
    return module if name == "watch" else getattr(module, name)  # ddpbench.watch can be called
