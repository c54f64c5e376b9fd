"""A small GPT in one file: settings are globals, no DataLoader, gradients of several micro-steps.

It knows nothing of ddpbench. It runs alone, or under torchrun.
"""

import hashlib
import math
import os
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

eval_interval = 4
eval_iters = 2
max_iters = 8
gradient_accumulation_steps = 4
batch_size = 2
block_size = 16
vocab_size = 65
width = 32
heads = 4
learning_rate = 1e-2
min_lr = 1e-3
grad_clip = 1.0
weight_decay = 0.1
compiler = ""  # a backend of torch.compile
for word in sys.argv[1:]:
    key, value = word.removeprefix("--").split("=")
    assert key in globals(), f"unknown setting: {key}"
    globals()[key] = type(globals()[key])(value)
    print(f"Overriding: {key} = {value}")


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        b, t, c = x.shape
        parts = self.attend(self.norms[0](x)).split(width, dim=2)
        q, k, v = (part.view(b, t, heads, c // heads).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(b, t, c))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """Embeddings, two blocks, and a head that shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process, seed_offset, ddp_world_size = True, 0, 1

torch.manual_seed(1337 + seed_offset)
ctx = nullcontext()
text = np.random.default_rng(5).integers(0, vocab_size, 4096).astype(np.uint16)


def get_batch():
    starts = torch.randint(len(text) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(text[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack(
        [torch.from_numpy(text[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts]
    )
    return x, y


torch.manual_seed(1337)
model = GPT()
raw_model = model
torch.manual_seed(1337 + seed_offset)
scaler = torch.amp.GradScaler("cpu", enabled=False)
decay = [p for p in model.parameters() if p.dim() >= 2]
no_decay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}],
    lr=learning_rate,
)
if compiler:
    model = torch.compile(model, backend=compiler)
if ddp:
    model = DistributedDataParallel(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(eval_iters)]
    model.train()
    return sum(losses) / len(losses)


def get_lr(it):
    ratio = 0.5 * (1.0 + math.cos(math.pi * it / max_iters))
    return min_lr + ratio * (learning_rate - min_lr)


X, Y = get_batch()
t0 = time.time()
iter_num = 0
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        evaluated = raw_model if ddp else model
        print(f"step {iter_num}: loss {estimate_loss():.6f}", flush=True)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break

state = hashlib.sha256()
for p in raw_model.parameters():
    state.update(p.detach().numpy().tobytes())
print(f"rank {seed_offset} of {ddp_world_size}: {state.hexdigest()[:16]}", flush=True)
if ddp:
    dist.destroy_process_group()
