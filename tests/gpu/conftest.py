"""Expandable segments for every test here, chosen before CUDA starts: switching later upsets torch's allocator."""

from __future__ import annotations

import os

if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
