"""Training steps from torchvision's and transformers' own model lists, with random weights and synthetic batches."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional

from fxhome.errors import SpecError, nearest
from fxhome.units import format_bytes

_AUXILIARY_WEIGHT = 0.4
"""Weight of an auxiliary head's loss, as torchvision's own training script has it."""
_NUM_CLASSES = 1000
_SEQUENCE_LENGTH = 128

# Tasks of transformers' auto classes, each with the mapping that says which configurations it takes.
_TASKS = (
    ("MaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("CausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("ImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
)


class ClassificationLoss(nn.Module):
    """A torchvision classifier with cross entropy; auxiliary heads count with their usual weight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """images [B, 3, H, W], labels [B] -> scalar loss."""
        output = self.model(images)
        if isinstance(output, torch.Tensor):
            return functional.cross_entropy(output, labels)
        main, *auxiliary = [logits for logits in output if logits is not None]
        loss = functional.cross_entropy(main, labels)
        for logits in auxiliary:
            loss = loss + _AUXILIARY_WEIGHT * functional.cross_entropy(logits, labels)
        return loss


class LabelledLoss(nn.Module):
    """A transformers model called with labels, which makes it compute its own loss."""

    def __init__(self, model: nn.Module, input_name: str) -> None:
        super().__init__()
        self.model = model
        self.input_name = input_name
        if hasattr(model, "loss_function"):
            # Found once, here: for some models the look-up logs a warning, which would break the graph in two.
            model.loss_function = model.loss_function

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """inputs [B, T] tokens or [B, 3, H, W] pixels, labels as the model wants them -> scalar loss."""
        loss: torch.Tensor = self.model(**{self.input_name: inputs}, labels=labels).loss
        return loss


def torchvision_step(spec: str, torchvision: ModuleType, name: str, size: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """Classifier `name` with its loss, and (images, labels) for `size` images."""
    models = torchvision.models
    names = models.list_models(module=models)
    if name not in names:
        raise SpecError(
            f"SPEC {spec!r}: torchvision has no classification model {name!r}{nearest(name, names)}; "
            "torchvision.models.list_models() names them, and path/to/file.py:factory takes any other model"
        )
    # These two draw their weights through scipy for a minute unless told not to.
    arguments = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = models.get_model(name, weights=None, **arguments)
    (crop,) = models.get_model_weights(name).DEFAULT.transforms().crop_size
    pixels = getattr(model, "image_size", crop)
    images = torch.randn(size, 3, pixels, pixels)
    return ClassificationLoss(model), (images, torch.randint(_NUM_CLASSES, (size,)))


def transformers_step(spec: str, transformers: ModuleType, name: str, size: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """Model type `name` in its configuration class's own size with random weights, and `size` labelled inputs."""
    # Its notes about defaults are not for someone who typed a model's name.
    transformers.logging.set_verbosity_error()
    configs = transformers.CONFIG_MAPPING
    if name not in configs:
        raise SpecError(
            f"SPEC {spec!r}: transformers has no model type {name!r}{nearest(name, configs.keys())}; "
            "give the model_type of a configuration class such as gpt2, bert or vit"
        )
    config = configs[name]()
    for task, mapping_name in _TASKS:
        if type(config) in getattr(transformers, mapping_name):
            auto_class = getattr(transformers, f"AutoModelFor{task}")
            _check_fits(spec, auto_class, config)
            step = _image_step if task == "ImageClassification" else _token_step
            return step(auto_class.from_config(config), config, size)
    raise SpecError(
        f"SPEC {spec!r}: {name!r} is no causal or masked language model and no image classifier; "
        "build it in path/to/file.py:factory"
    )


def _token_step(model: nn.Module, config: Any, size: int) -> tuple[nn.Module, tuple[Any, ...]]:
    if hasattr(config, "use_cache"):
        config.use_cache = False
    length = min(_SEQUENCE_LENGTH, getattr(config, "max_position_embeddings", _SEQUENCE_LENGTH))
    tokens = torch.randint(config.vocab_size, (size, length))
    return LabelledLoss(model, "input_ids"), (tokens, tokens.clone())


def _image_step(model: nn.Module, config: Any, size: int) -> tuple[nn.Module, tuple[Any, ...]]:
    pixels = getattr(config, "image_size", 224)
    images = torch.randn(size, getattr(config, "num_channels", 3), pixels, pixels)
    return LabelledLoss(model, "pixel_values"), (images, torch.randint(config.num_labels, (size,)))


def _check_fits(spec: str, auto_class: Any, config: Any) -> None:
    """Refuse a default configuration whose weights and gradients alone exceed the memory of the device in use."""
    device = torch.get_default_device()
    if device.type == "meta":
        return
    with torch.device("meta"):
        weights = sum(weight.nbytes for weight in auto_class.from_config(config).parameters())
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if 2 * weights > available:
        raise SpecError(
            f"SPEC {spec!r}: its default configuration needs {format_bytes(2 * weights)} for weights and gradients; "
            f"{format_bytes(available)} are free on {device.type}; build a smaller one in path/to/file.py:factory"
        )
