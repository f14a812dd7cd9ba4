"""What the scheduler's buffers needed for a plan, kept on disk.

Inductor's graph cache skips the scheduler when it hits, so the check after lowering sees nothing then. The same plan
on the
same versions was checked when the cached graphs were made: that result is read back here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fxhome.device import cache_directory


@dataclass(frozen=True)
class Lowered:
    """What a checked plan needs above what is resident: allocated; reserved by the caching allocator that is left to
    itself; the same with blocks laid where they fit; the least that it can do with under a cap before they are; what
    it holds between its forward and its backward, and at the worst moment of its forward.
    """

    above_resident_bytes: int
    reserved_bytes: int | None
    packed_bytes: int | None = None
    least_cap_bytes: int | None = None
    boundary_bytes: int = 0
    forward_bytes: int = 0


log = logging.getLogger("fxhome")


def _path(plan_fingerprint: str, is_baseline: bool) -> Path:
    key = hashlib.sha256(f"{plan_fingerprint}|{is_baseline}|{torch.__version__}|8".encode()).hexdigest()[:32]
    return cache_directory() / "lowered" / f"{key}.json"


def remember(plan_fingerprint: str, is_baseline: bool, lowered: Lowered) -> None:
    """Keep what was checked; a directory that cannot be written costs only the reuse."""
    path = _path(plan_fingerprint, is_baseline)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as handle:
            json.dump(asdict(lowered), handle)
        os.replace(handle.name, path)
    except OSError as error:
        log.warning("fxhome: %s cannot be written (%s); a warm cache will compile once more", path, error)


def recall(plan_fingerprint: str, is_baseline: bool) -> Lowered | None:
    """What was checked of a plan, or None where this plan was never checked here."""
    try:
        stored = json.loads(_path(plan_fingerprint, is_baseline).read_text(encoding="utf-8"))
        optional = ("reserved_bytes", "packed_bytes", "least_cap_bytes")
        sizes = {name: None if stored[name] is None else int(stored[name]) for name in optional}
        above, boundary, forward = (
            int(stored[name]) for name in ("above_resident_bytes", "boundary_bytes", "forward_bytes")
        )
        return Lowered(above, boundary_bytes=boundary, forward_bytes=forward, **sizes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("fxhome: a stored check cannot be read (%s); compiling once more", error)
        return None
