"""A few codec kernels on small tensors, for NVIDIA's compute-sanitizer to watch; the results are checked too.

compute-sanitizer --report-api-errors no --error-exitcode 9 python -m benchmarks.codec_sanitize
"""

from __future__ import annotations

import sys

import torch

from benchmarks.codec_checks import random_tensor
from benchmarks.codec_timing import DEVICE, RoundTrip, synchronize
from fxhome.cuda_kernels import codec_by_name, raise_if_corrupt

CASES = (
    ("zvc", torch.bfloat16), ("zvc", torch.float32), ("zvc_exponent", torch.bfloat16), ("exponent", torch.bfloat16),
    ("int4", torch.bfloat16), ("int4", torch.float32), ("bitpack", torch.bool),
    ("relu_mask", torch.float32), ("relu6_mask", torch.bfloat16),
)  # fmt: skip
SIZES = (1, 4097)


def main() -> int:
    """Round trips of every case; with the variable-rate codecs, one whose copy leaves something out."""
    for name, dtype in CASES:
        for numel in SIZES:
            source = random_tensor(numel, dtype, 0.5)
            trip = RoundTrip(codec_by_name(name), source)
            trip.check()
            if not trip.codec.fixed_rate:
                site = trip.site
                site.is_encoding, site._limit_bytes = True, 1 << 60
                site.bound_bytes = lambda head=site.head_bytes: head  # type: ignore[method-assign]
                trip.to_host()
                synchronize()
                trip.check()
            raise_if_corrupt()
            print(f"{name} {dtype} {numel}: right", flush=True)
    print(f"{len(CASES) * len(SIZES)} round trips on {DEVICE}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
