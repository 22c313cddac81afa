"""A small network for digits, trained by Lightning's Trainer."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import trireme
from trireme.data import digits

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 16
train, test = digits.load()


class Classifier(lightning.LightningModule):
    """A perceptron with one hidden layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index))

    def configure_optimizers(self):
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 150)
        for _ in range(optimizer.loop_steps):
            schedule.step()
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self):
        return optimizer.prepare(DataLoader(train, batch_size), epochs=2)


module = Classifier()
optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
optimizer = trireme.distribute(module, optimizer, clip_norm=1.0)
options = {"logger": False, "enable_progress_bar": False, "default_root_dir": "runs/lightning"}
options["enable_checkpointing"] = optimizer.is_chief
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **options)
trainer.fit(module)
trainer.validate(module, DataLoader(test, 100), verbose=False)
print("loss", trainer.callback_metrics["loss"].item())
