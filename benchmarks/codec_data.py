"""Dense bf16 activations for the codec benchmark: those of a small GELU transformer trained on Python's own standard
library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 512, 8, 6, 256, 32
STEPS = 200


def stdlib_text() -> torch.Tensor:
    """Bytes of the standard library's top-level modules, in name order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return cast(torch.Tensor, x + self.down(F.gelu(self.up(self.norm2(x)))))


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return cast(torch.Tensor, self.head(self.norm(self.blocks(self.embed(tokens) + self.position(positions)))))


@dataclass(frozen=True)
class Activations:
    tensors: list[torch.Tensor]
    """Contiguous bf16 tensors that autograd saved in one training step, largest stretches only."""
    loss: float
    """Training loss of the last step, nats per byte."""


def trained_activations(steps: int = STEPS, seed: int = 0) -> Activations:
    """Train, then collect what one more forward saves for its backward."""
    torch.manual_seed(seed)
    text = stdlib_text().cuda().long()
    model = ByteModel().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def loss_of_batch() -> torch.Tensor:
        starts = torch.randint(text.numel() - CONTEXT - 1, (BATCH, 1), device="cuda")
        window = text[starts + torch.arange(CONTEXT + 1, device="cuda")]
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(window[:, :-1])
        return F.cross_entropy(logits.float().reshape(-1, 256), window[:, 1:].reshape(-1))

    for _ in range(steps):
        loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.numel() >= BATCH * CONTEXT * WIDTH:
            saved[tensor.untyped_storage().data_ptr()] = tensor.detach().contiguous().clone()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of_batch()
    return Activations(list(saved.values()), float(loss.detach()))
