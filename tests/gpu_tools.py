"""Training steps on a GPU under an allocator that enforces the budget, and what to compare them with."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxhome.backend import fxhome as backend
from fxhome.device import cached_profile

MIB = 1 << 20
Step = Callable[..., Any]


class Blocks(nn.Module):
    """Pre-norm attention and MLP blocks with a loss; `breaks` puts a graph break behind the first blocks."""

    def __init__(self, width: int, count: int, dropout: float = 0.0, attention: bool = True, breaks: int = 0) -> None:
        super().__init__()
        self.attention, self.dropout, self.breaks = attention, dropout, breaks
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(count))

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, tokens, width)."""
        h = self.norms[index](x)
        q, k, v = self.qkv[index](h).view(*h.shape[:2], 3, 8, -1).permute(2, 0, 3, 1, 4)
        if self.attention:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = torch.sigmoid(q) * torch.tanh(k) + v
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        wide = F.dropout(F.gelu(self.up[index](x)), self.dropout)
        result: torch.Tensor = x + self.down[index](wide)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, tokens, width)."""
        x = self.block(0, x)
        if self.breaks > 0:  # not in the loop: Dynamo would run all of it eagerly
            torch._dynamo.graph_break()
        x = self.block(1, x)
        if self.breaks > 1:
            torch._dynamo.graph_break()
        for index in range(2, len(self.norms)):
            x = self.block(index, x)
        return x.float().square().mean()


class Convolutions(nn.Module):
    """Convolution, batch norm, ReLU and max-pool, channels-last, under bf16 autocast, with cross-entropy."""

    def __init__(self, width: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = blocks
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2 * blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2 * blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: (batch, 3, height, width)."""
        with torch.autocast("cuda", torch.bfloat16):
            x = self.stem(images)
            for index in range(self.blocks):
                y = F.relu(self.norms[2 * index](self.convs[2 * index](x)))
                y = self.norms[2 * index + 1](self.convs[2 * index + 1](y))
                x = F.relu(y + x)
                if index == self.blocks // 2:
                    # Windows that do not overlap: otherwise the backward adds up in no fixed order.
                    x = F.max_pool2d(x, 2)
            logits = self.head(x.mean((2, 3)))
        labels = torch.arange(len(images), device=images.device) % 10
        return F.cross_entropy(logits.float(), labels)


def transformer(dropout: float = 0.0, **how: Any) -> tuple[nn.Module, torch.Tensor]:
    """In fp32; without attention, whose backward adds up in no fixed order: two stock runs differ."""
    torch.manual_seed(0)
    model = Blocks(512, 6, dropout=dropout, attention=False, **how).cuda()
    return model, torch.randn(8, 512, 512, device="cuda")


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Channels-last, fp32 weights."""
    torch.manual_seed(0)
    model = Convolutions().cuda().to(memory_format=torch.channels_last)
    return model, torch.randn(128, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)


@dataclass
class Record:
    """What some steps left behind: the last loss, gradients and buffers, and each step's peak in bytes."""

    loss: torch.Tensor
    values: dict[str, torch.Tensor]
    peaks: list[int]
    start_bytes: int
    """Allocated before the first step, records of earlier runs included."""

    @property
    def steady_peak(self) -> int:
        """The highest peak of all steps but the first, which also compiles and times operators."""
        return max(self.peaks[1:])

    def differences(self, other: Record) -> list[str]:
        """Names whose values are not bitwise equal."""
        names = [name for name, value in self.values.items() if not torch.equal(value, other.values[name])]
        return names if torch.equal(self.loss, other.loss) else ["loss", *names]

    def distance(self, other: Record) -> float:
        """Norm of the difference of all gradients over their norm."""
        pairs = [(a.double(), other.values[name].double()) for name, a in self.values.items() if "grad" in name]
        squares = sum((float((a - b).square().sum()) for a, b in pairs), 0.0)
        return float((squares / sum((float(b.square().sum()) for _, b in pairs), 0.0)) ** 0.5)


def run(
    model: nn.Module,
    x: torch.Tensor,
    *,
    steps: int = 3,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **how: Any,
) -> Record:
    """Some steps of a copy of `model`, compiled by `torch.compile(..., **how)`, or eager without it."""
    start_bytes = torch.cuda.memory_allocated()
    own = copy.deepcopy(model)
    step: Step = torch.compile(own, **how) if how else own
    chosen = optimizer(own.parameters()) if optimizer is not None else None
    peaks = []
    for _ in range(steps):
        for weight in own.parameters():
            weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(3)
        loss = step(x)
        loss.backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        loss = loss.detach()
        if chosen is not None:
            chosen.step()
    values = {f"grad {name}": w.grad.clone() for name, w in own.named_parameters() if w.grad is not None}
    values |= {name: buffer.clone() for name, buffer in own.named_buffers()}
    return Record(loss, values, peaks, start_bytes)


def planned(budget_bytes: int, inner: str, **options: Any) -> dict[str, Any]:
    """Arguments of `torch.compile`."""
    return {"backend": backend, "options": {"memory_budget": budget_bytes, "inner": inner, **options}}


def fresh_device() -> None:
    """No compiled graph, no cached block, no cap."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def keep_all_peak(model: nn.Module, x: torch.Tensor, inner: str, **how: Any) -> int:
    """Peak of a steady step with everything kept, in bytes: what a budget is a share of."""
    fresh_device()
    peak = run(model, x, **how, **planned(64 << 30, inner)).steady_peak
    fresh_device()
    return peak


@contextlib.contextmanager
def enforced(budget_bytes: int) -> Iterator[None]:
    """Cap the allocator at the budget and max(256 MiB, 3 %)."""
    cached_profile("cuda")  # measured once, which takes more than a small budget
    fresh_device()
    total = torch.cuda.get_device_properties(0).total_memory
    cap = budget_bytes + max(256 * MIB, budget_bytes * 3 // 100)
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    try:
        yield
    finally:
        fresh_device()


@contextlib.contextmanager
def busy_link(size_bytes: int = 64 * MIB) -> Iterator[None]:
    """Another thread copies both ways on streams of its own, with memory that it took before."""
    host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    stop = threading.Event()
    torch.cuda.synchronize()

    def copy_on() -> None:
        while not stop.is_set():
            with torch.cuda.stream(streams[0]):
                host[0].copy_(device[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                device[1].copy_(host[1], non_blocking=True)
            for stream in streams:
                stream.synchronize()

    thread = threading.Thread(target=copy_on)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        torch.cuda.synchronize()
