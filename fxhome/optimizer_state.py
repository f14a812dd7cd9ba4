"""What the optimizers of this process will hold and do not hold yet: known before any of them has made a step.

    live optimizer -> its step on tensors without memory (meta) -> bytes of its state

A training loop needs these bytes from its second step on; only a refusal asks for them.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

log = logging.getLogger("fxhome")

_stepped: list[weakref.ref[Optimizer]] = []
"""The optimizers that have made a step, in the order of their first ones."""


_told_of_steps: list[Callable[[], None]] = []


@functools.cache
def watch_optimizers() -> None:
    """Note from now on which optimizers make steps."""
    register_optimizer_step_post_hook(_note_step)


def at_optimizer_steps(callback: Callable[[], None]) -> None:
    """Call `callback` behind every optimizer's step from now on; twice is once."""
    watch_optimizers()
    if callback not in _told_of_steps:
        _told_of_steps.append(callback)


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a step that is traced itself: nothing here is for a graph
    for callback in _told_of_steps:
        callback()
    if all(known() is not optimizer for known in _stepped):
        _stepped.append(weakref.ref(optimizer))


def num_stepped() -> int:
    """How many optimizers have made a step so far."""
    return len(_stepped)


def optimizers_of(weights: Collection[torch.Tensor]) -> list[Optimizer]:
    """The live optimizers that update one of `weights` at least."""
    wanted = {id(weight) for weight in weights}
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    return [optimizer for optimizer in found if any(id(weight) in wanted for weight in _weights(optimizer))]


def has_stepped(optimizer: Optimizer, before: int | None = None) -> bool:
    """Whether it has made a step; `before`: among the first so many that did."""
    return any(known() is optimizer for known in _stepped[:before])


def arrived_bytes(before: int, device: torch.device) -> int:
    """State on `device` of the optimizers that have made their first step since `before` had made one."""
    late = [optimizer for known in _stepped[before:] if (optimizer := known()) is not None]
    return sum(state_bytes(optimizer, device) or 0 for optimizer in late)


def missing_gradient_bytes(optimizer: Optimizer, device: torch.device) -> int:
    """Gradients that its weights on `device` may get and do not have now."""
    return sum(weight.nbytes for weight in _weights(optimizer) if weight.device == device and weight.grad is None)


def state_bytes(optimizer: Optimizer, device: torch.device) -> int | None:
    """Bytes of its state for its weights on `device`, there or to come; None where a trial does not tell."""
    weights = [weight for weight in _weights(optimizer) if weight.device == device]
    there = sum(_state_size(optimizer.state[weight], device) for weight in weights if weight in optimizer.state)
    missing = {id(weight) for weight in weights if not optimizer.state.get(weight)}
    if not missing or has_stepped(optimizer):
        return there
    to_come = _tried(optimizer, missing, device)
    return None if to_come is None else there + to_come


def _weights(optimizer: Optimizer) -> list[torch.Tensor]:
    every = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [weight for weight in every if isinstance(weight, torch.Tensor) and weight.requires_grad]


def _state_size(state: object, device: torch.device) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and leaf.device == device)


def _tried(optimizer: Optimizer, missing: Collection[int], device: torch.device) -> int | None:
    """What one step of a copy of the optimizer, on weights without memory, leaves as their state."""
    kind = type(optimizer)
    trial = kind.__new__(kind)
    trial.__dict__.update(optimizer.__dict__)
    trial.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer itself
    trial.state = defaultdict(dict)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(trial, name, OrderedDict())
    step: Any = kind.step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without the hooks of all optimizers
    try:
        with _disable_current_modes():
            trial.param_groups = [_without_memory(group, missing) for group in optimizer.param_groups]
            step(trial)
    # What a user's optimizer raises where it is given such weights may be anything; it is then unknown, and said so.
    except Exception as error:
        log.debug("the state of %s is not known before its first step: %s", kind.__name__, error)
        return None
    states = [leaf for leaf in tree_leaves(list(trial.state.values())) if isinstance(leaf, torch.Tensor)]
    # Counters stay on the CPU wherever the weights are.
    return sum(leaf.nbytes for leaf in states if leaf.device.type in ("meta", device.type))


def _without_memory(group: dict[str, Any], missing: Collection[int]) -> dict[str, Any]:
    weights = []
    for weight in group["params"]:
        if id(weight) in missing:
            weights.append(torch.empty_like(weight, device="meta").detach().requires_grad_())
            weights[-1].grad = torch.empty_like(weights[-1])
    # One weight after the other: the quicker ways ask for a device.
    plain: dict[str, Any] = {name: False for name in ("foreach", "fused", "capturable") if name in group}
    return {**group, **plain, "params": weights}
