"""A training script of the Trainer of Hugging Face; it knows nothing of ddpbench."""

import torch
from transformers import Trainer, TrainingArguments


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
        )

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.model(inputs), labels)}


torch.manual_seed(0)
rows = torch.randn(640, 256)
trainer = Trainer(
    Regression(),
    TrainingArguments(
        "trained",
        use_cpu=True,
        ddp_backend="gloo",
        num_train_epochs=1,
        per_device_train_batch_size=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=[{"inputs": row, "labels": row.sum(dim=0, keepdim=True)} for row in rows],
)
loss = trainer.train().training_loss
if trainer.is_world_process_zero():
    print("loss", repr(loss))
