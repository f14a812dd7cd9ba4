"""Which codec each saved tensor could take, and what it would cost: by dtype, by its producer, by measured rates.

    bool                                        bitpack, on the device or on its way to the host
    int64 indices of a pooling window           narrow8 / 16 / 32, by the range that the shape proves; both places
    floats with zeros (relu, dropout, ...)      zvc or zvc_exponent, for the way to the host only: its size varies
    dense floats                                exponent, for the way to the host
    floats asked for no values (mask_readers)   relu_mask or relu6_mask, one bit each; both places
    any float, if the user says lossy           block quantisation, both places; logarithms never in four bits

What is swapped encoded is encoded by one kernel on the device first. Only fixed-rate codecs may stay there: a size that
depends on the data is no promise, so a variable-rate one counts with its worst case there and with its expected size on
the link. On a GPU it is offered where two kernels and two shorter copies take less than two plain copies; whether it is
used is the search's decision. Here is only what it may choose from, and the assumed size, which observation replaces.
"""

import dataclasses
import logging
import operator
from collections.abc import Callable, Collection, Mapping

import torch
from torch import fx

from fxhome.cuda_kernels.codec import codec_by_name, kernels_problem
from fxhome.device import DeviceProfile
from fxhome.passes.facts import GraphFacts, StorageFacts, allocated_bytes
from fxhome.passes.mask_readers import mask_codecs
from fxhome.runtime.codec_ops import buffer_bytes

log = logging.getLogger("fxhome.planner")

# Below this a kernel's launch costs more than the bytes are worth.
MIN_CODEC_BYTES = 1 << 16
# The float codec of `lossy=True`: the closest fixed-rate one (see docstrings of cuda_kernels.blockint for its bound).
DEFAULT_LOSSY = "int8"
LOSSY_CODECS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
# Used in place of a coarse codec for what the backward exponentiates: there an absolute error becomes a relative one. A
# small language model with everything in four bits loses 4 % of its loss, with all but these logarithms 0.1 %.
FINER = {"int4": "int8"}
# The NumPy references stand in for the kernels on a CPU: measured on one core, bytes of the tensor per second.
REFERENCE_BYTES_PER_S = 2.0e8
# A tensor with fewer zeros than this moves faster as it is.
MIN_ZERO_SHARE = 0.25
# Share of a listed exponent tile's worst case in use: measured on saved activations of a trained transformer.
EXPONENT_TAIL_SHARE = 0.05

# Bytes in use as a share of what a copy moves: it is told a bound, not the size.
LINK_EFFICIENCY = 0.98

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class StorageCodecs:
    """What one storage may be encoded with. Names are empty where there is no such codec.

    encoded_bytes: on the device, as the allocator counts them; `swap` too encodes there first. link_bytes: what a plain
    copy of the same duration moves. slot_bytes: of the host slot.
    """

    compress: str = ""
    swap: str = ""
    encoded_bytes: int = 0
    encode_us: float = 0.0
    decode_us: float = 0.0
    link_bytes: int = 0
    slot_bytes: int = 0


NO_CODEC = StorageCodecs()


def choose_codecs(
    module: fx.GraphModule,
    facts: GraphFacts,
    profile: DeviceProfile,
    allow: Collection[str],
    *,
    lossy: bool | str = False,
    observed: Mapping[str, int] | None = None,
) -> tuple[StorageCodecs, ...]:
    """One entry per storage of `facts`; all empty without "compress" in `allow`, or where the kernels cannot run.

    lossy: True, or the name of a lossy codec. observed: encoded bytes seen at run time, by storage name.
    """
    if "compress" not in allow:
        return (NO_CODEC,) * len(facts.storages)
    if facts.device_type == "cuda" and (problem := kernels_problem()) is not None:
        log.warning("fxhome: nothing is compressed: %s", problem)
        return (NO_CODEC,) * len(facts.storages)
    nodes = {node.name: node for node in module.graph.nodes}
    lossy_name = lossy if isinstance(lossy, str) else DEFAULT_LOSSY if lossy else ""
    masks = mask_codecs(module.graph, facts, allow)
    chooser = _Chooser(facts, profile, lossy_name, masks, dict(observed or {}), {})
    return tuple(chooser.choose(storage, nodes.get(storage.name)) for storage in facts.storages)


def assumed_bytes(codec_name: str, numel: int, dtype: torch.dtype, zeros: float) -> int:
    """Encoded bytes to plan with, for a tensor of which the share `zeros` is zero."""
    codec = codec_by_name(codec_name)
    if codec.fixed_rate:
        return codec.encoded_bytes(numel, dtype)
    return codec.expected_bytes(numel, dtype, EXPONENT_TAIL_SHARE if codec_name == "exponent" else 1.0 - zeros)


@dataclasses.dataclass
class _Chooser:
    facts: GraphFacts
    profile: DeviceProfile
    lossy: str
    masks: dict[str, str]
    observed: dict[str, int]
    zeros: dict[fx.Node, float]

    def choose(self, storage: StorageFacts, node: fx.Node | None) -> StorageCodecs:
        if node is None or not storage.may_move or storage.size_bytes < MIN_CODEC_BYTES:
            return NO_CODEC
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or storage.copy_bytes % value.dtype.itemsize:
            return NO_CODEC
        fixed = self._fixed(node, value, storage)
        if fixed is not None:
            return self._fixed_rate(fixed, storage, value.dtype)
        if value.dtype not in _FLOATS:
            return NO_CODEC
        zeros, numel = zero_share(node, self.zeros), storage.copy_bytes // value.dtype.itemsize
        names = ("zvc", "zvc_exponent") if zeros >= MIN_ZERO_SHARE else ("exponent",)
        offers = [
            self._variable_rate(name, storage, value.dtype, assumed_bytes(name, numel, value.dtype, zeros))
            for name in names
        ]
        best = min(offers, key=self._round_trip_us)
        if (seen := self.observed.get(storage.name)) is not None:
            # What was seen is the size under the codec that the assumptions lead to: another one would give another.
            best = self._variable_rate(best.swap, storage, value.dtype, seen)
        plain = StorageCodecs(link_bytes=storage.copy_bytes)
        pays = self.profile.kind == "cpu" or self._round_trip_us(best) < self._round_trip_us(plain)
        return best if pays else NO_CODEC

    def _fixed(self, node: fx.Node, value: torch.Tensor, storage: StorageFacts) -> str | None:
        if value.dtype == torch.bool:
            return "bitpack"
        if value.dtype == torch.int64:
            return _narrow_codec(node)
        if storage.name in self.masks and value.dtype in _FLOATS:
            return self.masks[storage.name]
        # Unused bytes between the elements could hold anything, and a block shares one scale.
        dense = value.numel() * value.dtype.itemsize == storage.copy_bytes
        if not self.lossy or value.dtype not in _FLOATS or not dense:
            return None
        return FINER.get(self.lossy, self.lossy) if node.target in _EXPONENTIATED else self.lossy

    def _fixed_rate(self, name: str, storage: StorageFacts, dtype: torch.dtype) -> StorageCodecs:
        encoded = buffer_bytes(name, storage.copy_bytes, dtype)
        size = allocated_bytes(encoded, self.facts.planned_for)
        times = self._kernels_us(name, storage, dtype, encoded)
        return StorageCodecs(name, name, size, *times, encoded, encoded)

    def _variable_rate(self, name: str, storage: StorageFacts, dtype: torch.dtype, expected: int) -> StorageCodecs:
        worst = buffer_bytes(name, storage.copy_bytes, dtype)
        size = allocated_bytes(worst, self.facts.planned_for)
        times = self._kernels_us(name, storage, dtype, expected)
        link = min(worst, round(expected / LINK_EFFICIENCY))
        return StorageCodecs("", name, size, *times, link, worst)

    def _kernels_us(
        self, name: str, storage: StorageFacts, dtype: torch.dtype, encoded_bytes: int
    ) -> tuple[float, float]:
        """Microseconds of an encode and of a decode."""
        if self.profile.kind == "cpu":
            us = storage.copy_bytes / REFERENCE_BYTES_PER_S * 1e6
            return us, us
        codec, rate, numel = codec_by_name(name), self.profile.memory_bytes_per_s, storage.copy_bytes // dtype.itemsize
        # A variable-rate codec runs a second, tiny kernel each way: what the copy has left out.
        launches = self.profile.launch_us * (1 if codec.fixed_rate else 2)
        encode, decode = (
            launches + codec.kernel_seconds(direction, numel, dtype, rate, encoded_bytes) * 1e6
            for direction in ("encode", "decode")
        )
        return encode, decode

    def _round_trip_us(self, offer: StorageCodecs) -> float:
        link_us = offer.link_bytes / self.profile.d2h_bytes_per_s + offer.link_bytes / self.profile.h2d_bytes_per_s
        return offer.encode_us + offer.decode_us + link_us * 1e6


def _narrow_codec(node: fx.Node) -> str | None:
    """The narrow codec that holds every value of an index tensor whose range its shape proves; None where none does."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node) or node.args[1] != 1:
        return None
    source = node.args[0]
    if source.target is not _aten.max_pool2d_with_indices.default:
        return None
    image = source.args[0]
    assert isinstance(image, fx.Node)
    height, width = (int(extent) for extent in image.meta["val"].shape[-2:])
    positions = height * width
    return "narrow8" if positions <= 1 << 8 else "narrow16" if positions <= 1 << 16 else "narrow32"


def zero_share(node: fx.Node, known: dict[fx.Node, float]) -> float:
    """Share of zeros to expect in a node's result, from what made it: an assumption, corrected by observation."""
    if node not in known:
        known[node] = 0.0  # an in-place alias may lead back here
        known[node] = _zero_share(node, known)
    return known[node]


def _zero_share(node: fx.Node, known: dict[fx.Node, float]) -> float:
    if node.op != "call_function":
        return 0.0
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        first = node.args[1] == 0 and isinstance(source, fx.Node)
        return zero_share(source, known) if first and isinstance(source, fx.Node) else 0.0
    if target in _RECTIFIERS:
        return 0.5
    packet = getattr(target, "overloadpacket", None)
    sources = node.all_input_nodes
    if packet is None or not sources:
        return 0.0
    if packet in _PASS_ON:
        return zero_share(sources[0], known)
    if (rule := _RULES.get(packet)) is not None:
        return rule(node, [zero_share(source, known) for source in sources])
    return 0.0


def _dropout(node: fx.Node, zeros: list[float]) -> float:
    dropped = node.args[1]
    return 1.0 - (1.0 - zeros[0]) * (1.0 - float(dropped)) if isinstance(dropped, float) else zeros[0]


def _product(node: fx.Node, zeros: list[float]) -> float:
    if len(zeros) == 1:
        return zeros[0]
    return 1.0 - (1.0 - zeros[0]) * (1.0 - zeros[1])


def _window_maximum(node: fx.Node, zeros: list[float]) -> float:
    # Neighbours are alike: a 2 x 2 window of a rectified image is all zero far more often than four independent values.
    return zeros[0] * 0.6


def _concatenation(node: fx.Node, zeros: list[float]) -> float:
    sizes = [source.meta["val"].numel() for source in node.all_input_nodes]
    return float(sum(share * size for share, size in zip(zeros, sizes, strict=True)) / max(1, sum(sizes)))


def _clamped(node: fx.Node, zeros: list[float]) -> float:
    return 0.5 if len(node.args) > 1 and node.args[1] in (0, 0.0) else 0.0


_EXPONENTIATED = frozenset({_aten._log_softmax.default})
_RECTIFIERS = frozenset({_aten.relu.default, _aten.relu_.default, _aten.threshold.default})
_PASS_ON = frozenset(
    {
        _aten.view,
        _aten._unsafe_view,
        _aten.reshape,
        _aten.permute,
        _aten.transpose,
        _aten.t,
        _aten.clone,
        _aten.detach,
        _aten.alias,
        _aten.expand,
        _aten.squeeze,
        _aten.unsqueeze,
        _aten._to_copy,
        torch.ops.prims.convert_element_type,
    }
)
_RULES: dict[object, Callable[[fx.Node, list[float]], float]] = {
    _aten.native_dropout: _dropout,
    _aten.mul: _product,
    _aten.max_pool2d_with_indices: _window_maximum,
    _aten.cat: _concatenation,
    _aten.clamp_min: _clamped,
    _aten.clamp: _clamped,
    _aten.hardtanh: _clamped,
}
