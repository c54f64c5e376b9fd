"""A training script of Lightning, with a validation; it knows nothing of ddpbench."""

import lightning
import torch


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
inputs = torch.randn(640, 256)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    val_check_interval=20,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), loader, loader)
if trainer.is_global_zero:
    print("loss", repr(trainer.callback_metrics["loss"].item()))
