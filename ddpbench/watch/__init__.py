"""Explain any training job while it runs: phases, collectives, stragglers, links, replicas.

torchrun --nproc-per-node 4 -m ddpbench.watch train.py --epochs 3
ddpbench.watch()      in the script itself: this package can be called
"""

import sys
from types import ModuleType

from ddpbench.watch.api import watch


class _Callable(ModuleType):
    __call__ = staticmethod(watch)


sys.modules[__name__].__class__ = _Callable
