"""Layout of one slot of the csr and rle codecs: values, then 16-bit positions, each part padded to 16 bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TILE_BYTES = 4096
RAW_FLAG = 1 << 31
"""Set in a tile's word if the slot holds the tile as it is."""
CODEC_IDS = {False: 2, True: 3}
"""By `runs`."""


def listed_bytes(counts: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Slot bytes of `counts` listed elements of `width` bytes."""
    return (counts * width + 15) // 16 * 16 + (counts * 2 + 15) // 16 * 16


def most_listed(width: int) -> int:
    """The largest count whose list fits in a slot."""
    fitting = listed_bytes(np.arange(TILE_BYTES // width + 1), width) <= TILE_BYTES
    return int(np.flatnonzero(fitting)[-1])
