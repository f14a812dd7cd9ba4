"""Models on which the promise is tried: nothing had been tuned on them when they were added. See promise.py.

Each builder takes a device and gives a module that returns its scalar loss, and its arguments; nothing is loaded. On a
CPU they are of a few images or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads import Built, Classifier


def _vision(build: Callable[[], nn.Module], batch: int, size: int = 224) -> Callable[[torch.device], Built]:
    def built(device: torch.device) -> Built:
        on_cuda = device.type == "cuda"
        count, side = (batch, size) if on_cuda else (16, 64)
        with torch.device(device):
            model = Classifier(build(), autocast=on_cuda)
            return model, (torch.randn(count, 3, side, side), torch.randint(0, 1000, (count,)))

    return built


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name)  # type: ignore[no-any-return]

    return build


class _Loss(nn.Module):
    """A transformers model that computes its own loss; bf16 autocast on CUDA."""

    def __init__(self, model: nn.Module, autocast: bool) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, first: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """first: what the model reads; labels: what its loss is taken against."""
        with torch.autocast(first.device.type, torch.bfloat16, enabled=self.autocast):
            loss: torch.Tensor = self.model(first, labels=labels).loss
        return loss


def _transformers(kind: str, batch: int, tokens: int, **config: Any) -> Callable[[torch.device], Built]:
    def built(device: torch.device) -> Built:
        import transformers

        on_cuda = device.type == "cuda"
        count, length = (batch, tokens) if on_cuda else (8, 64)
        settings = getattr(transformers, kind.split(":")[0])(**config)
        with torch.device(device):
            model = _Loss(getattr(transformers, kind.split(":")[1])(settings), autocast=on_cuda)
            ids = torch.randint(0, 1000, (count, length))
            return model, (ids, ids)

    return built


class _Recurrent(nn.Module):
    """Gated recurrence written out over time, with a spectral filter: many small operators, complex numbers."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.gate, self.candidate = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.filter = nn.Parameter(torch.randn(steps // 2 + 1, width, dtype=torch.complex64) / width)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """x: (batch, steps, width); labels the same."""
        x = torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=self.steps, dim=1)
        state, states = torch.zeros_like(x[:, 0]), []
        for i in range(self.steps):
            joined = torch.cat([x[:, i], state], 1)
            gate = torch.sigmoid(self.gate(joined))
            state = gate * state + (1 - gate) * torch.tanh(self.candidate(joined))
            states.append(state)
        return F.mse_loss(torch.stack(states, 1), labels)


def _recurrent(device: torch.device) -> Built:
    count, width, steps = (4096, 1024, 32) if device.type == "cuda" else (256, 32, 16)
    with torch.device(device):
        return _Recurrent(width, steps), (torch.randn(count, steps, width), torch.randn(count, steps, width))


MODELS: dict[str, Callable[[torch.device], Built]] = {
    "convnext": _vision(_torchvision("convnext_tiny"), 128),
    "swin": _vision(_torchvision("swin_t"), 128),
    "efficientnet": _vision(_torchvision("efficientnet_b0"), 256),
    "regnet": _vision(_torchvision("regnet_y_1_6gf"), 256),
    "shufflenet": _vision(_torchvision("shufflenet_v2_x1_0"), 512),
    "bert": _transformers("BertConfig:BertForMaskedLM", 32, 512, num_hidden_layers=6),
    "t5": _transformers(
        "T5Config:T5ForConditionalGeneration", 32, 512, decoder_start_token_id=0, pad_token_id=0
    ),
    "mistral": _transformers(
        "MistralConfig:MistralForCausalLM", 8, 1024, num_hidden_layers=6, hidden_size=1024, intermediate_size=3584,
        num_attention_heads=16, num_key_value_heads=4, vocab_size=32000,
    ),
    "bart": _transformers(
        "BartConfig:BartForConditionalGeneration", 16, 512, encoder_layers=4, decoder_layers=4, d_model=512,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8,
        vocab_size=32000, use_cache=False,
    ),
    "bloom": _transformers(
        "BloomConfig:BloomForCausalLM", 8, 1024, n_layer=6, hidden_size=1024, n_head=16, vocab_size=32000,
        use_cache=False,
    ),
    "opt": _transformers(
        "OPTConfig:OPTForCausalLM", 8, 1024, num_hidden_layers=6, hidden_size=1024, ffn_dim=4096,
        num_attention_heads=16, vocab_size=32000, word_embed_proj_dim=1024, use_cache=False,
    ),
    "neox": _transformers(
        "GPTNeoXConfig:GPTNeoXForCausalLM", 8, 1024, num_hidden_layers=6, hidden_size=1024, intermediate_size=4096,
        num_attention_heads=16, vocab_size=32000, use_cache=False,
    ),
    "xlnet": _transformers(
        "XLNetConfig:XLNetLMHeadModel", 16, 512, n_layer=4, d_model=768, n_head=12, d_inner=3072, vocab_size=32000
    ),
    "recurrent": _recurrent,
}  # fmt: skip
