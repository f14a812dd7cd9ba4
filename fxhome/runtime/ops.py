"""The four transfer operators, visible to FX, Dynamo's backends and Inductor.

    host = swap_out(x)                     start copying x's storage to the host
    host = swap_out_wait(host, x)          x may be freed after this
    x2   = swap_in(host, ...)              start copying back into a new buffer
    x2   = swap_in_wait(x2, host)          x2 may be read, host may be freed after this

The waits return their first argument itself, which `torch.library.custom_op` does not allow: hence plain definitions.
They are inserted behind autograd and functionalization, and none of the four has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.node import has_side_effect

from fxhome.runtime import transfer

_LIBRARY = torch.library.Library("fxhome", "FRAGMENT")
# Bytes are copied as they lie: a compiler that hands over another layout than the traced one breaks the reload.
_TAGS = (torch.Tag.needs_exact_strides,)

_SCHEMAS = {
    "swap_out": "(Tensor src) -> Tensor",
    "swap_out_wait": "(Tensor(a) host, Tensor src) -> Tensor(a)",
    "swap_in": (
        "(Tensor host, int[] size, int[] stride, int storage_offset, ScalarType dtype, Device device) -> Tensor"
    ),
    "swap_in_wait": "(Tensor(a) dev, Tensor host) -> Tensor(a)",
}


def _fake_swap_out(src: torch.Tensor) -> torch.Tensor:
    return torch.empty(src.untyped_storage().nbytes(), dtype=torch.uint8, device="cpu")


def _fake_swap_in(
    host: torch.Tensor,
    size: list[int],
    stride: list[int],
    storage_offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    storage = torch.empty(host.numel(), dtype=torch.uint8, device=device).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, storage_offset, size, stride)


def _fake_wait(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first


_KERNELS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "swap_out": (transfer.swap_out, _fake_swap_out),
    "swap_out_wait": (transfer.swap_out_wait, _fake_wait),
    "swap_in": (transfer.swap_in, _fake_swap_in),
    "swap_in_wait": (transfer.swap_in_wait, _fake_wait),
}

for _name, _schema in _SCHEMAS.items():
    _kernel, _fake = _KERNELS[_name]
    _LIBRARY.define(_name + _schema, tags=_TAGS)
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxhome::{_name}", _fake, lib=_LIBRARY)

swap_out = torch.ops.fxhome.swap_out.default
swap_out_wait = torch.ops.fxhome.swap_out_wait.default
swap_in = torch.ops.fxhome.swap_in.default
swap_in_wait = torch.ops.fxhome.swap_in_wait.default

# The waits' results are mostly used, but a dead one must survive clean-up too: its order is its purpose.
for _wait in (swap_out_wait, swap_in_wait):
    has_side_effect(_wait)
