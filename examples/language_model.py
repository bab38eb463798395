"""Train a small GPT on Python's own source code, one byte at a time.

    python examples/language_model.py                                               # one process
    drivetrain launch --cpu --num_processes 2 examples/language_model.py            # two CPU ranks
    torchrun --nproc_per_node 2 examples/language_model.py                          # the same, started by torchrun

All three give the same losses: a global batch of 32 rows is 4 micro-batches of 8 on one process, 2 on two.
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Accelerator

CONTEXT = 64  # bytes that the model sees at once


class Block(nn.Module):
    """Attention over earlier bytes, then a small network for each byte."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        rows, length, width = x.shape
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.query_key_value(self.norm_1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.network(self.norm_2(x))


class GPT(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, width=128, layers=2, heads=4):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, rows):
        x = self.bytes(rows) + self.positions(torch.arange(rows.shape[1], device=rows.device))
        return self.head(self.norm(self.blocks(x)))


def next_byte_loss(model, rows, reduction="mean"):
    """Cross-entropy in nats of each byte but the first, given those before it."""
    rows = rows.long()
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


def read_text(train_rows, heldout_rows):
    """Return rows of bytes for training, and others from files that training never sees: every tenth one."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    train = b"".join(file.read_bytes() for i, file in enumerate(files) if i % 10)
    heldout = b"".join(file.read_bytes() for file in files[::10])
    return spread(train, train_rows), spread(heldout, heldout_rows)


def spread(text, count):
    """Cut text into rows and take `count` of them, evenly from beginning to end."""
    length = CONTEXT + 1
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length].view(-1, length)
    return rows[torch.arange(count) * len(rows) // count]


@torch.no_grad()
def bits_per_byte(accelerator, model, loader):
    """Return how many bits the model needs for each held-out byte: 8 knows nothing."""
    model.eval()
    losses = []
    for rows in loader:
        nats = next_byte_loss(model, rows, reduction="none").view(len(rows), CONTEXT)
        losses.append(accelerator.gather_for_metrics(nats.mean(dim=1)))  # every row of the data once, on any topology
    model.train()
    return torch.cat(losses).mean().item() / math.log(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch_size", type=int, default=8, help="rows per process and backward")
    parser.add_argument("--train_rows", type=int, default=2560)
    parser.add_argument("--heldout_rows", type=int, default=512)
    parser.add_argument("--output_dir", default="out/language_model")
    args = parser.parse_args()

    accelerator = Accelerator(global_batch_size=32, seed=0)
    train, heldout = read_text(args.train_rows, args.heldout_rows)
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    heldout_loader = DataLoader(heldout, batch_size=args.batch_size)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = args.epochs * math.ceil(len(train) / 32)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=updates + 1)
    model, optimizer, train_loader, heldout_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, heldout_loader, scheduler
    )

    history = [f"before {bits_per_byte(accelerator, model, heldout_loader):.3f}"]
    for epoch in range(1, args.epochs + 1):
        start, first_step = time.perf_counter(), accelerator.step
        for rows in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(next_byte_loss(model, rows))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.step % 25 == 0:
                update = accelerator.last_update
                speed = (accelerator.step - first_step) * 32 * CONTEXT / (time.perf_counter() - start)
                accelerator.print(
                    f"step {update.step}: loss {update.loss:.4f}, lr {update.lr:.2e}, {speed:,.0f} tokens/s"
                )
        history.append(f"epoch {epoch} {bits_per_byte(accelerator, model, heldout_loader):.3f}")
        accelerator.print(f"held-out bits per byte: {history[-1]}")

    accelerator.save_model(model, args.output_dir)
    accelerator.print(f"model saved in {args.output_dir}")
    accelerator.print(f"final training loss: {accelerator.last_update.loss:.6f}")
    accelerator.print(f"held-out bits per byte: {', '.join(history)}")


if __name__ == "__main__":
    main()
