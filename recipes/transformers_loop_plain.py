"""A small GPT-2 that continues sequences, trained in a loop of one's own."""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 16
torch.manual_seed(0)
sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=None, eos_token_id=None))
words = (torch.arange(16) * torch.randint(1, 5, (384, 1)) + torch.randint(50, (384, 1))) % 50
data = [{"input_ids": line, "labels": line} for line in words]
loader = DataLoader(data, batch_size, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 4, 48)

for _ in range(2):
    for batch in loader:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
print("loss", model(input_ids=words, labels=words).loss.item())
