"""A generator and a discriminator; the noise is drawn in the loop, or, `fixed`, by the data set."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trireme


class Points(Dataset):
    def __init__(self):
        angle = torch.linspace(0, 6.28, 160)
        self.points = torch.stack([angle.cos(), angle.sin()], 1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], torch.randn(4)


torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
one, other = trireme.distribute(
    [generator, discriminator],
    [
        torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
    ],
)
score = nn.functional.binary_cross_entropy_with_logits
for _, (real, noise) in one.epochs(DataLoader(Points(), 8, shuffle=True), 2):
    if "fixed" not in sys.argv:
        noise = torch.randn(len(real), 4)
    other.zero_grad()
    with torch.no_grad():
        fake = generator(noise)
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    (score(discriminator(real), ones) + score(discriminator(fake), zeros)).backward()
    other.step(examples=len(real))
    one.zero_grad()
    score(discriminator(generator(noise)), ones).backward()
    one.step(examples=len(real))
one.close()
