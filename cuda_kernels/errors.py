"""Errors of the codec library. It imports nothing of the rest of fxhome, so they live here."""

from __future__ import annotations


class CodecError(ValueError):
    """A codec was asked for something it cannot do, or an encoded buffer is not what it should be."""


class CodecUnavailableError(ImportError):
    """Kernels cannot be compiled in this environment; the message says what to install."""
