"""A small BERT that classifies sentences, trained by the Trainer of Hugging Face Transformers."""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 16
torch.manual_seed(0)
sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = BertForSequenceClassification(BertConfig(**sizes, **dropout, intermediate_size=64))
words = torch.randint(1, 100, (512, 12))
labels = (words < 50).sum(1).gt(6).long()
data = [{"input_ids": w, "labels": label} for w, label in zip(words, labels, strict=True)]
args = TrainingArguments(
    "runs/trainer", num_train_epochs=2, per_device_train_batch_size=batch_size, learning_rate=1e-3,
    max_grad_norm=1.0, train_sampling_strategy="sequential", save_strategy="epoch", use_cpu=True,
    report_to="none",
)
trainer = Trainer(model, args, train_dataset=data[:384], eval_dataset=data[384:])
trainer.train()
print("loss", trainer.evaluate()["eval_loss"])
