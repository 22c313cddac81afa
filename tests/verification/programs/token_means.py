"""A tagger of padded sentences: the loss is the mean over the tokens of a batch that count."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trireme


class Sentences(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.rows = []
        for _ in range(200):
            length = int(torch.randint(2, 15, (1,), generator=generator))
            tokens = torch.randint(1, 50, (length,), generator=generator)
            self.rows.append((tokens, tokens % 5))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def pad(rows):
    tokens = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True)
    tags = nn.utils.rnn.pad_sequence([r[1] for r in rows], batch_first=True, padding_value=-100)
    return tokens, tags


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 5))
optimizer = trireme.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
loader = DataLoader(Sentences(), batch_size=8, shuffle=True, collate_fn=pad)
for _, (tokens, tags) in optimizer.epochs(loader, 2):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).transpose(1, 2), tags, ignore_index=-100)
    loss.backward()
    if "fixed" in sys.argv:
        optimizer.step(examples=int((tags != -100).sum()))
    else:
        optimizer.step()
optimizer.close()
