"""The training steps that are measured: each a module that returns its scalar loss, and its arguments.

Weights and data are drawn from a seed on the device; nothing is loaded. CNNs run channels-last under bf16 autocast,
transformers in bf16, as people train them on today's GPUs; on CPU everything is fp32. Those named `_nchw` get their
models and images as torchvision makes them, which leaves the layout to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]


@dataclass(frozen=True)
class Workload:
    """A named training step. `build(batch, device)` makes it; `batch` holds the default batch per kind of device."""

    name: str
    build: Callable[[int, torch.device], Built]
    batch: dict[str, int]


class DecoderBlock(nn.Module):
    """Pre-norm attention and GELU MLP, as in GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, tokens, width)."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Decoder-only transformer with its loss."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList([DecoderBlock(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """ids, labels: (batch, tokens) int64."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


class Classifier(nn.Module):
    """An image model with cross-entropy; auxiliary heads count as in their papers. bf16 autocast on CUDA."""

    def __init__(self, model: nn.Module, autocast: bool) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """images: (batch, 3, height, width); labels: (batch,) int64."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.autocast):
            output = self.model(images)
        heads = output if isinstance(output, tuple) else (output,)
        losses = [F.cross_entropy(head.float(), labels) for head in heads if head is not None]
        return torch.stack([loss * (1.0 if i == 0 else 0.4) for i, loss in enumerate(losses)]).sum()


class LanguageLoss(nn.Module):
    """A transformers causal language model with its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Found once, here: for GPT-2 the look-up logs a warning, which would break the graph in two.
        model.loss_function = model.loss_function

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (batch, tokens) int64, also the labels."""
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


class ResidualBlock(nn.Module):
    """Group norm, SiLU, convolution, twice, with a time embedding: the block of diffusion U-Nets."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inside), nn.GroupNorm(32, outside)
        self.conv1, self.conv2 = nn.Conv2d(inside, outside, 3, padding=1), nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """x: (batch, channels, height, width); time: (batch, features)."""
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """A denoising U-Net with self-attention at the lowest resolutions, trained to predict noise."""

    def __init__(self, width: int, factors: tuple[int, ...] = (1, 2, 4), autocast: bool = True) -> None:
        super().__init__()
        self.autocast = autocast
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem, self.width = nn.Conv2d(3, width, 3, padding=1), width
        sizes = [width * factor for factor in factors]
        self.down = nn.ModuleList()
        inside = width
        for size in sizes:
            self.down.append(
                nn.ModuleList(
                    [ResidualBlock(inside, size, time), ResidualBlock(size, size, time), nn.Conv2d(size, size, 3, 2, 1)]
                )
            )
            inside = size
        self.middle1, self.middle2 = ResidualBlock(inside, inside, time), ResidualBlock(inside, inside, time)
        self.attention = nn.MultiheadAttention(inside, 8, batch_first=True)
        self.up = nn.ModuleList()
        for size in reversed(sizes):
            self.up.append(nn.ModuleList([ResidualBlock(inside + size, size, time), ResidualBlock(size, size, time)]))
            inside = size
        self.out = nn.Sequential(nn.GroupNorm(32, inside), nn.SiLU(), nn.Conv2d(inside, 3, 3, padding=1))

    def forward(self, noisy: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """noisy, noise: (batch, 3, height, width); times: (batch,) float32. Returns the mean squared error."""
        frequencies = torch.exp(-torch.arange(self.width // 2, device=times.device) * (9.2 / (self.width // 2)))
        angles = times[:, None] * frequencies
        with torch.autocast(noisy.device.type, torch.bfloat16, enabled=self.autocast):
            time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
            x = self.stem(noisy)
            kept = []
            for first, second, shrink in self.down:
                x = second(first(x, time), time)
                kept.append(x)
                x = shrink(x)
            x = self.middle1(x, time)
            flat = x.flatten(2).transpose(1, 2)
            x = x + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).reshape(x.shape)
            x = self.middle2(x, time)
            for first, second in self.up:
                skip = kept.pop()
                x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
                x = second(first(torch.cat([x, skip], 1), time), time)
            predicted = self.out(x)
        return F.mse_loss(predicted.float(), noise)


def _decoder(width: int, layers: int, heads: int, vocabulary: int, tokens: int) -> Callable[[int, torch.device], Built]:
    def build(batch: int, device: torch.device) -> Built:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device):
            model = Decoder(width, layers, heads, vocabulary, tokens).to(dtype)
            ids = torch.randint(0, vocabulary, (batch, tokens))
            labels = torch.randint(0, vocabulary, (batch, tokens))
        return model, (ids, labels)

    return build


def _image(name: str, pixels: int, channels_last: bool = True) -> Callable[[int, torch.device], Built]:
    def build(batch: int, device: torch.device) -> Built:
        import torchvision

        cuda = device.type == "cuda"
        extra = {"init_weights": False} if name == "inception_v3" else {}
        with torch.device(device):
            model = torchvision.models.get_model(name, weights=None, **extra)
            images = torch.randn(batch, 3, pixels, pixels)
            labels = torch.randint(0, 1000, (batch,))
        if cuda and channels_last:
            model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
        return Classifier(model, cuda), (images, labels)

    return build


def _language(kind: str, tokens: int, **config: int) -> Callable[[int, torch.device], Built]:
    def build(batch: int, device: torch.device) -> Built:
        import transformers

        settings = getattr(transformers, f"{kind}Config")(**config)
        settings._attn_implementation = "sdpa"
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(settings).to(dtype)
            ids = torch.randint(0, settings.vocab_size, (batch, tokens))
        return LanguageLoss(model), (ids,)

    return build


def _unet(width: int, pixels: int) -> Callable[[int, torch.device], Built]:
    def build(batch: int, device: torch.device) -> Built:
        cuda = device.type == "cuda"
        with torch.device(device):
            model = UNet(width, autocast=cuda)
            noisy, noise = torch.randn(batch, 3, pixels, pixels), torch.randn(batch, 3, pixels, pixels)
            times = torch.rand(batch)
        if cuda:
            model, noisy = model.to(memory_format=torch.channels_last), noisy.to(memory_format=torch.channels_last)
        return model, (noisy, times, noise)

    return build


_LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
_SMALL_LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
_ALL = (
    Workload("transformer", _decoder(4096, 12, 32, 32000, 2048), {"cuda": 8, "cpu": 1}),
    Workload("llama", _language("Llama", 2048, vocab_size=32000, **_LLAMA), {"cuda": 8, "cpu": 1}),
    Workload(
        "gpt2_xl", _language("GPT2", 1024, n_embd=1600, n_layer=48, n_head=25, n_positions=1024), {"cuda": 4, "cpu": 1}
    ),
    Workload(
        "gpt2_small_width",
        _language("GPT2", 128, n_embd=128, n_layer=4, n_head=4, n_positions=128, vocab_size=512),
        {"cuda": 64, "cpu": 16},
    ),
    Workload("llama_small_width", _language("Llama", 128, **_SMALL_LLAMA), {"cuda": 64, "cpu": 16}),
    Workload("unet", _unet(128, 64), {"cuda": 64, "cpu": 1}),
    Workload("vit_b_16", _image("vit_b_16", 224), {"cuda": 128, "cpu": 16}),
    Workload("vit_l_16", _image("vit_l_16", 224), {"cuda": 128, "cpu": 2}),
    Workload("resnet50", _image("resnet50", 224), {"cuda": 512, "cpu": 8}),
    Workload("resnet50_nchw", _image("resnet50", 224, channels_last=False), {"cuda": 512, "cpu": 8}),
    Workload("vgg16_nchw", _image("vgg16", 224, channels_last=False), {"cuda": 256, "cpu": 32}),
    Workload("resnet152", _image("resnet152", 224), {"cuda": 256, "cpu": 4}),
    Workload("vgg16", _image("vgg16", 224), {"cuda": 256, "cpu": 32}),
    Workload("mobilenet_v2", _image("mobilenet_v2", 224), {"cuda": 512, "cpu": 8}),
    Workload("squeezenet1_1", _image("squeezenet1_1", 224), {"cuda": 1024, "cpu": 16}),
    Workload("inception_v3", _image("inception_v3", 299), {"cuda": 256, "cpu": 4}),
    Workload("densenet121", _image("densenet121", 224), {"cuda": 256, "cpu": 4}),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
