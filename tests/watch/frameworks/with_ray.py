"""A training script of Ray Train, with one line of ddpbench in its train function."""

import sys
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

import ddpbench


def train(settings: dict[str, str]) -> None:
    with ddpbench.watch(output=settings["output"]):
        _train(settings)


def _train(settings: dict[str, str]) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)]
    model = prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(640, 256)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    for batch, target in prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=8)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
    if ray.train.get_context().get_world_rank() == 0:
        Path(settings["loss"]).write_text(f"loss {loss.item()!r}\n")


output, storage = sys.argv[1:]
ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
TorchTrainer(
    train,
    train_loop_config={"output": output, "loss": f"{storage}/loss"},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=storage),
).fit()
print(Path(storage, "loss").read_text(), end="")
