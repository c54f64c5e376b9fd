"""Find the settings that make a DDP step fastest, or show that the defaults are best.

ddpbench tune -n 2                                 bucket sizes and options of DDP
ddpbench tune --workload mypackage.model:build --what buckets,hooks
torchrun --nproc-per-node 4 -m ddpbench.tune --workload transformer

The options are those of `ddpbench ddp`. They define the default that all settings are compared
with. The exit codes are those of `ddpbench ddp`.
"""

from __future__ import annotations

from functools import partial

from ddpbench.session import launches
from ddpbench.tune import command

GROUP = "measure"
HELP = "find the settings that make a DDP step fastest"
IMPORTS = True
add_arguments = command.add_arguments
run = partial(launches.run, command.Options, command.measure_launch)
