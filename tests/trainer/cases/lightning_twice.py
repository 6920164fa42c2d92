"""Lightning's ``fit`` twice in one script: another trainer goes on with the same module."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from virtualflow.integrations.lightning import ElasticStrategy


class Regressor(pl.LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1
        self.network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
module = Regressor()
for lr in (0.1, 0.01):
    module.lr = lr
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ElasticStrategy(),
        accumulate_grad_batches=4,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=4))
    print("fitted", trainer.global_step)
