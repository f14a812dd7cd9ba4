"""Storages that are not a plain contiguous float tensor: tied, viewed, split, strided, of any dtype, or empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.hazard_tools import SWAP, Case, Mode, all_modes, check

ROWS, WIDTH = 512, 64


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, and a linear layer used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = F.gelu(self.mix(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Views(nn.Module):
    """Saved views whose bases are not saved, splits, chunks, expands and multi-output operators."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            a, b, c = self.wide(self.norm(x)).chunk(3, dim=1)
            values, _ = torch.sort(a, dim=1)
            top, where = torch.topk(b, WIDTH // 2, dim=1)
            mean = c.mean(dim=1, keepdim=True).expand(-1, WIDTH)
            x = self.back(values.t().contiguous().t() * c.sigmoid()) * mean.sin()
            x = x + torch.cat([top, b.gather(1, where)], dim=1) * a.unfold(1, WIDTH, 1).squeeze(1)
        variance, average = torch.var_mean(x, dim=0)
        return x * variance + average


class Strided(nn.Module):
    """Transposed, sliced, permuted and overlapping activations that the backward reads with these strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(ROWS, ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x.t().contiguous().t()))
        y = torch.tanh(self.second(x.t())).t()
        z = torch.empty_strided((ROWS, WIDTH), (1, ROWS), dtype=x.dtype).copy_(y * x).sin()
        return z[::2].cos() * y[1::2].exp() * x.as_strided((ROWS // 2, WIDTH), (WIDTH, 1), WIDTH).exp()


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = F.max_pool2d(F.silu(conv(x)), 3, stride=1, padding=1)
        return x


class LaidOutOtherwise(nn.Module):
    """Operators whose kernels, on channels-last tensors, give other strides than tracing records for them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.convs[0](x)))
        x = torch.roll(self.convs[1](x).exp(), 2, 1).tanh()
        x = F.channel_shuffle(F.rrelu(self.convs[2](x), training=True), 2)
        return x * x.exp()


class Dtypes(nn.Module):
    """bool masks, int64 indices, bf16, fp16 and float64 activations among the saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            mask = (x > 0) & (x.bfloat16().sin().float() < 0.9)
            index = x.argsort(dim=1)
            half = x.bfloat16().exp().float() * x.half().tanh().float()
            x = torch.where(mask, half, x.double().sin().float()).gather(1, index).masked_fill(x.isnan(), 0.0)
        return x


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.complex64))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(self.layer(x), x) * self.turn
        z = torch.fft.fft(z.exp() * 1e-2, dim=1) * self.turn.conj()
        back: torch.Tensor = torch.fft.ifft(z * z.abs(), dim=1)
        result: torch.Tensor = back.real * z.angle()
        return result


class NotTensors(nn.Module):
    """Integer tensors, numbers, booleans, None, strings and nested containers among the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        power: int,
        flag: bool,
        extra: dict[str, Any],
        none: None,
    ) -> torch.Tensor:
        assert none is None
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale + x[rows] ** power
            if flag and extra["kind"] == "sum":
                x = x + extra["items"][0] * extra["items"][1]
        return x


class Zero(nn.Module):
    """Empty tensors, tensors of one element and scalars take part too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(torch.cat([x, x[:0].exp()]))) * self.gain.exp() + x.mean().sin()
        return x


class SparseEmbedding(nn.Module):
    """An embedding whose gradient is a sparse tensor: an input's indices and values of the backward's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def floats() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


CASES = {
    "tied weights": Case(lambda: (Tied(), (torch.randint(0, 100, (8, 64)),))),
    "views and multi-output operators": Case(lambda: (Views(), (floats(),))),
    "strided activations": Case(lambda: (Strided(), (floats(),))),
    "a strided input with a gradient": Case(
        lambda: (Strided(), (torch.randn(2 * WIDTH, ROWS).t()[:, ::2].requires_grad_(),))
    ),
    "channels last": Case(
        lambda: (
            ChannelsLast().to(memory_format=torch.channels_last),
            (torch.randn(4, 8, 24, 24).to(memory_format=torch.channels_last).requires_grad_(),),
        )
    ),
    "kernels that lay out otherwise than recorded": Case(
        lambda: (
            LaidOutOtherwise().to(memory_format=torch.channels_last),
            (torch.randn(4, 8, 24, 24).to(memory_format=torch.channels_last),),
        )
    ),
    "dtypes": Case(lambda: (Dtypes(), (floats(),))),
    "bf16 model": Case(lambda: (Views().bfloat16(), (floats().bfloat16(),))),
    "complex": Case(lambda: (Complex(), (floats(),))),
    "inputs that are no float tensors": Case(
        lambda: (
            NotTensors(),
            (floats(), torch.randperm(ROWS), 0.5, 2, True, {"kind": "sum", "items": [floats(), 3]}, None),
        )
    ),
    "a sparse gradient": Case(lambda: (SparseEmbedding(), (torch.randint(0, 100, (8, 64)),))),
    "empty tensors and scalars": Case(lambda: (Zero(), (floats(),))),
}


@all_modes
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_storage(name: str, mode: Mode) -> None:
    check(CASES[name], mode)


def test_masks_indices_and_halves_are_really_swapped() -> None:
    plan = check(CASES["dtypes"], SWAP)

    swapped = {entry.size_bytes // (ROWS * WIDTH) for entry in plan.placements if entry.placement.value == "swap"}
    assert {1, 8} <= swapped  # bytes per element: bool and int64


def test_tied_weights_get_one_gradient() -> None:
    model, _ = CASES["tied weights"].build()
    assert isinstance(model, Tied)
    assert model.head.weight is model.embed.weight
    check(CASES["tied weights"], SWAP)
