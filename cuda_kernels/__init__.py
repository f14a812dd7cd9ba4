"""Codecs for saved tensors: a NumPy reference and a Numba-CUDA kernel each, behind one protocol.

Importing this package imports neither Numba nor CUDA; see `fxhome.cuda_kernels.codec` for the protocol.
"""

from fxhome.cuda_kernels.codec import Codec, codec_by_name, codec_names
from fxhome.cuda_kernels.errors import CodecError, CodecUnavailableError
from fxhome.cuda_kernels.launch import raise_if_corrupt

__all__ = ["Codec", "CodecError", "CodecUnavailableError", "codec_by_name", "codec_names", "raise_if_corrupt"]
