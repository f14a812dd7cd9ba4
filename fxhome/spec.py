"""SPEC of the command line: which model to train, with which synthetic batch.

    torchvision:resnet50 | transformers:gpt2 | path/to/file.py:factory      (factory(batch_size) -> model, example_args)

`load_workload` gives a module that returns the step's scalar loss, and its arguments. Everything wrong with a SPEC is
one `SpecError` that says what was given, what is allowed and what to do.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxhome import spec_models
from fxhome.errors import SpecError, nearest

_FORMS = "torchvision:resnet50, transformers:gpt2 or path/to/file.py:factory"
_FACTORY_RETURNS = (
    "factory(batch_size) should return (model, example_args): a torch.nn.Module and a tuple of its inputs"
)

DEFAULT_BATCH_SIZES = {"cpu": 4, "cuda": 64}
"""Activations dominate weights on both; two CPU cores train a few steps of ResNet-50 in well under a minute."""


@dataclass(frozen=True)
class Workload:
    """A training step without its optimizer: `model(*example_args)` is the scalar loss."""

    spec: str
    model: nn.Module
    example_args: tuple[Any, ...]
    batch_size: int


class ScalarLoss(nn.Module):
    """A user's model whose output is reduced to a scalar: `output.loss`, else the mean over its floating tensors."""

    def __init__(self, model: nn.Module, where: str) -> None:
        super().__init__()
        self.model = model
        self.where = where

    def forward(self, *args: Any) -> torch.Tensor:
        """Run the model and reduce what it returns."""
        output = self.model(*args)
        if isinstance(loss := getattr(output, "loss", None), torch.Tensor):
            return loss
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        floats = [tensor.float().mean() for tensor in tensors if tensor.is_floating_point()]
        if not floats:
            raise SpecError(
                f"{self.where}: the model returns no floating-point tensor, so there is no loss to train on; "
                "return a loss, or outputs whose mean can stand for one"
            )
        return torch.stack(floats).sum()


def load_workload(spec: str, *, batch_size: int | None, device: torch.device, seed: int) -> Workload:
    """Build the model of `spec` with weights and data drawn from `seed`, on `device`.

    `batch_size` None takes the default of the device's kind. On the meta device nothing is allocated or drawn. Raise
    `SpecError` for every mistake in the SPEC.
    """
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not name:
        raise SpecError(f"SPEC {spec!r} names no source and model; give {_FORMS}")
    size = DEFAULT_BATCH_SIZES.get(device.type, DEFAULT_BATCH_SIZES["cpu"]) if batch_size is None else batch_size
    if size < 1:
        raise SpecError(f"batch size {size} for SPEC {spec!r} is not allowed; give an int of at least 1")
    torch.manual_seed(seed)
    with device:
        model, args = _builder(spec, source, name)(size)
    model = model.to(device).train()
    args = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), args)
    return Workload(spec=spec, model=model, example_args=args, batch_size=size)


def _builder(spec: str, source: str, name: str) -> Callable[[int], tuple[nn.Module, tuple[Any, ...]]]:
    if source == "torchvision":
        return lambda size: spec_models.torchvision_step(spec, _require(spec, "torchvision"), name, size)
    if source == "transformers":
        return lambda size: spec_models.transformers_step(spec, _require(spec, "transformers"), name, size)
    if source.endswith(".py"):
        return lambda size: _call_factory(spec, _load_factory(spec, Path(source), name), size)
    hint = nearest(source, ("torchvision", "transformers"))
    raise SpecError(f"SPEC {spec!r} has the unknown source {source!r}{hint}; give {_FORMS}")


def _require(spec: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise SpecError(
            f"SPEC {spec!r} needs the package {package}, which does not import ({error}); "
            "install it with: pip install 'fxhome[models]'"
        ) from error


def _load_factory(spec: str, path: Path, name: str) -> Callable[[int], object]:
    if not path.is_file():
        raise SpecError(f"SPEC {spec!r}: there is no file {str(path)!r}; give {_FORMS}")
    module = _import_file(spec, path)
    factory = getattr(module, name, None)
    if not callable(factory):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise SpecError(
            f"SPEC {spec!r}: {str(path)!r} has no function {name!r}{nearest(name, own)}; "
            f"it defines {', '.join(own) or 'no function'}"
        )
    return factory  # type: ignore[no-any-return]


def _import_file(spec: str, path: Path) -> ModuleType:
    description = importlib.util.spec_from_file_location(f"fxhome_spec_{path.stem}", path)
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules[description.name] = module
    # As `python file.py` does, so that the file finds its neighbours.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        description.loader.exec_module(module)
    except Exception as error:  # the user's own file may raise anything
        raise SpecError(
            f"SPEC {spec!r}: {_error_place(error, path)}; make the file importable with: python {path}"
        ) from error
    return module


def _call_factory(spec: str, factory: Callable[[int], object], batch_size: int) -> tuple[nn.Module, tuple[Any, ...]]:
    path = Path(spec.rpartition(":")[0])
    try:
        result = factory(batch_size)
    except Exception as error:  # the user's own factory may raise anything
        raise SpecError(f"SPEC {spec!r}: factory({batch_size}) failed, {_error_place(error, path)}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise SpecError(f"SPEC {spec!r}: the factory returned {_kind(result)}; {_FACTORY_RETURNS}")
    model, args = result
    if not isinstance(model, nn.Module):
        raise SpecError(f"SPEC {spec!r}: the factory's first value is {_kind(model)}; {_FACTORY_RETURNS}")
    if isinstance(args, torch.Tensor):
        raise SpecError(f"SPEC {spec!r}: the factory's second value is one Tensor; write (tensor,); {_FACTORY_RETURNS}")
    if not isinstance(args, (tuple, list)):
        raise SpecError(f"SPEC {spec!r}: the factory's second value is {_kind(args)}; {_FACTORY_RETURNS}")
    return ScalarLoss(model, f"SPEC {spec!r}"), tuple(args)


def _error_place(error: Exception, path: Path) -> str:
    """Name the last line of the user's file that the error passed through, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    place = f"{path}, line {line}" if line is not None else str(path)
    return f"{place}: {type(error).__name__}: {error}"


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
