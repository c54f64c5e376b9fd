"""A training script of Accelerate, as its tutorial writes one; it knows nothing of ddpbench."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs = torch.randn(960, 256)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch, target in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(batch), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print("loss", repr(accelerator.reduce(loss.detach(), "mean").item()))
accelerator.end_training()
