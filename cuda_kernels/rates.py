"""How fast the kernels are: shares of the device-to-device copy rate, bytes read + written. No CUDA, no Numba.

Measured on an H200 (copy rate 3760 GB/s) with 256 MiB tensors by benchmarks/codecs.py, section "on device".
"""

_MEASURED: dict[tuple[str, int], tuple[float, float]] = {
    ("zvc", 4): (0.64, 0.64),
    ("zvc", 2): (0.65, 0.64),
    ("zvc", 1): (0.56, 0.59),
    ("bitpack", 1): (0.82, 0.84),
    ("narrow8", 8): (0.88, 0.78),
    ("narrow16", 8): (0.88, 0.78),
    ("narrow32", 8): (0.94, 0.86),
    ("zvc_exponent", 4): (0.61, 0.60),
    ("zvc_exponent", 2): (0.37, 0.50),
    ("relu_mask", 4): (0.82, 0.34),
    ("relu_mask", 2): (0.67, 0.60),
    ("relu6_mask", 2): (0.66, 0.60),
    ("exponent", 4): (0.65, 0.79),
    ("exponent", 2): (0.59, 0.60),
    ("fp8_e4m3", 4): (0.76, 0.71),
    ("fp8_e4m3", 2): (0.85, 0.87),
    ("fp8_e5m2", 4): (0.76, 0.71),
    ("fp8_e5m2", 2): (0.87, 0.87),
    ("int8", 4): (0.83, 0.75),
    ("int8", 2): (0.83, 0.79),
    ("int4", 4): (0.85, 0.75),
    ("int4", 2): (0.75, 0.70),
}
"""(codec, bytes of an element) -> (encode, decode)."""
UNMEASURED = 0.35
"""For what was not measured: no more than the slowest kernel reaches."""


def rate_share(codec: str, direction: str, itemsize: int) -> float:
    """Speed of an "encode" or "decode" as a share of the device-to-device copy rate."""
    encode, decode = _MEASURED.get((codec, itemsize), (UNMEASURED, UNMEASURED))
    return encode if direction == "encode" else decode
