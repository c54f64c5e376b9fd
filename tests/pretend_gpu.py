"""A GPU for a whole command, with `--import pretend_gpu`: torch simulates its tensors.

Each rank of `--device cuda` then works with simulated CUDA tensors, which gloo moves as the CPU's.
It also replaces nccl, which torch sees as gloo. So this proves nothing that depends on the name
nccl: the device_ids of a barrier, the device_id of a group, the point-to-point barrier on CUDA
tensors, and the dtypes and reductions that nccl accepts.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from simulated_gpu import GUARD_VARIABLE, PretendedKind, SimulatedGpu

from ddpbench.catalog.backends import BACKENDS
from ddpbench.runtime import devices

torch.ops.load_library(os.environ[GUARD_VARIABLE])
devices.KINDS["cuda"] = PretendedKind(SimulatedGpu().__enter__())
BACKENDS["nccl"] = replace(
    BACKENDS["nccl"],
    unavailable=lambda device: None,
    library=lambda: "gloo, in place of NCCL",
    register=lambda: "gloo",
)
