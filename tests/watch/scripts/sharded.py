"""Training over a mesh, as one writes it with fully_shard and tensor parallel: fsdp, hsdp or tp.

It knows nothing of ddpbench. Blocks compute their activations again in backward, the state is
saved in the midst of the training, and the loss is evaluated.
"""

import argparse
import tempfile
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed._composable import checkpoint as recompute
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("way", choices=("fsdp", "hsdp", "tp"))
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--flip", type=int, default=0, help="step in which a bit of a shard flips")
parser.add_argument("--drift", type=int, default=0, help="step in which a bias is changed by hand")
options = parser.parse_args()
WIDTH, CLASSES = 32, 10


def make_block() -> nn.Module:
    """Return a feed-forward layer."""
    return nn.Sequential(
        OrderedDict(
            norm=nn.LayerNorm(WIDTH),
            widen=nn.Linear(WIDTH, 4 * WIDTH),
            gelu=nn.GELU(),
            narrow=nn.Linear(4 * WIDTH, WIDTH),
        )
    )


dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
blocks = nn.Sequential(make_block(), make_block())
model = nn.Sequential(OrderedDict(blocks=blocks, head=nn.Linear(WIDTH, CLASSES)))
if options.way == "tp":
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    for block in model.blocks:
        parallelize_module(block, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
else:
    shape, names = (2, size // 2), ("dp_replicate", "dp_shard")
    if options.way == "fsdp":
        shape, names = (size,), ("dp_shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks:
        recompute(block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

generator = torch.Generator().manual_seed(0 if options.way == "tp" else rank)


def load_batch():
    inputs = torch.randn(16, WIDTH, generator=generator)
    return inputs, inputs.sum(1).long() % CLASSES


for step in range(options.steps):
    inputs, targets = load_batch()
    loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        if options.flip and step == options.flip and rank == size - 1:
            weight = model.get_parameter("blocks.1.widen.weight").to_local()
            weight.view(torch.int32)[2, 3] ^= 1 << 20
        if options.drift and step == options.drift and rank == 1:
            model.get_parameter("blocks.1.narrow.bias").to_local().add_(0.5)
        if step == options.steps // 2:
            if options.way != "tp":
                folder = [tempfile.mkdtemp() if rank == 0 else None]
                dist.broadcast_object_list(folder)
                state, optimizer_state = get_state_dict(model, optimizer)
                state = {"model": state, "optimizer": optimizer_state}
                checkpoint.save(state, checkpoint_id=folder[0])
            model.eval()
            model(load_batch()[0])
            model.train()

dist.destroy_process_group()
