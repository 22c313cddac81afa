"""A perceptron with BatchNorm, trained by Lightning's Trainer. `fixed`: with LayerNorm."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import trireme
from trireme.data import digits

train, _ = digits.load()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        norm = nn.LayerNorm(32) if "fixed" in sys.argv else nn.BatchNorm1d(32)
        layers = [nn.Flatten(), nn.Linear(64, 32), norm, nn.ReLU(), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers, nn.Linear(32, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return optimizer

    def train_dataloader(self):
        return optimizer.prepare(DataLoader(train, 16, shuffle=True), epochs=1)


module = Classifier()
optimizer = trireme.distribute(module, torch.optim.AdamW(module.parameters(), lr=3e-3))
options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **options)
trainer.fit(module)
optimizer.close()
