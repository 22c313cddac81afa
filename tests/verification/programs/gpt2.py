"""A small GPT-2 of transformers on sentences that are padded. `fixed`: weighed by their tokens."""

import sys

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import trireme


class Sentences(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 20, (1,), generator=generator))
        return torch.randint(0, 64, (length,), generator=generator)


def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    mask = (labels != -100).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False)
)
model.train()
optimizer = trireme.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for _, batch in optimizer.epochs(DataLoader(Sentences(), 4, shuffle=True, collate_fn=pad), 2):
    optimizer.zero_grad()
    model(**batch).loss.backward()
    if "fixed" in sys.argv:
        optimizer.step(examples=int((batch["labels"][:, 1:] != -100).sum()))
    else:
        optimizer.step()
optimizer.close()
