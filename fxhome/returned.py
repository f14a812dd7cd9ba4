"""What a forward returned, for as long as its caller holds it.

    out = model(x)         the first results live on ...
    out.loss.backward()
    out = model(x)         ... through all of the next forward, and are let go where it returns: before its backward

So an ordinary loop holds the results of two steps in its forwards, and of one in its backwards.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fxhome.passes.facts import allocated_bytes, storage_key


class Returned:
    """The storages of some results on one device; none of them is kept alive."""

    def __init__(self, results: Any, device: torch.device) -> None:
        storages = {
            storage_key(leaf): leaf.untyped_storage()
            for leaf in tree_leaves(results)
            if isinstance(leaf, torch.Tensor) and leaf.device == device and storage_key(leaf) is not None
        }
        self._held = [
            (weakref.ref(storage), allocated_bytes(storage.nbytes(), device.type)) for storage in storages.values()
        ]

    def alive_bytes(self) -> int:
        """What of it is still held by anybody."""
        return sum(size_bytes for storage, size_bytes in self._held if storage() is not None)
