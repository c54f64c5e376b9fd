"""A first DDP script, as tutorials write it: a small model, a sampler, a DataLoader, a checkpoint.

It knows nothing of ddpbench. Started by torchrun, or by anything that sets the same variables.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def digest(model: nn.Module) -> str:
    """Return a digest of all parameters and buffers, bit for bit."""
    state = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        state.update(name.encode() + tensor.numpy().tobytes())
    return state.hexdigest()[:16]


def train(arguments: argparse.Namespace, rank: int) -> None:
    """Train for some epochs, then load rank 0's checkpoint everywhere."""
    torch.manual_seed(0)
    layers = [nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_function = nn.MSELoss()
    points = torch.randn(256, 10)
    data = TensorDataset(points, points.sum(1, keepdim=True) + torch.randn(256, 1))
    sampler: DistributedSampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, 16, sampler=sampler, num_workers=arguments.workers)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
            end_early(arguments.end, arguments.after, rank, epoch, step)
        print(f"rank {rank} epoch {epoch} loss {loss.item():.6f}", flush=True)

    path = f"{tempfile.gettempdir()}/checkpoint-{os.environ['MASTER_PORT']}.pt"
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path, weights_only=True))
    dist.barrier()
    if rank == 0:
        Path(path).unlink()
    print(f"rank {rank} of {dist.get_world_size()}: {digest(model.module)}", flush=True)


def end_early(how: str, after: str, rank: int, epoch: int, step: int) -> None:
    """End this rank in the middle of the training, if asked to, once a file exists."""
    if rank != 1 or (epoch, step) < (1, 2) or not how:
        return
    if after and not Path(after).exists():
        time.sleep(0.05)
        return
    if how == "raise":
        raise ValueError("rank 1 has had enough")
    if how == "hang":
        time.sleep(1000)
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(4)
    os.kill(os.getpid(), int(how))


def main() -> None:
    """Join the others, train, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--end", default="", help="raise, exit, _exit, hang, or a signal's number")
    parser.add_argument("--after", default="", help="a file without which no rank ends early")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
