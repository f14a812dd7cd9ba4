"""The device vocabulary of the kernels: typed memory access, warp collectives and exact float operations for
Numba-CUDA.

Why not plain Numba arrays: a kernel that takes addresses as int64 launches with a pre-built argument pack
(launch.py), moves 16 bytes per instruction, never pays for Numba's negative-index wrap-around, and has 64-bit
addressing throughout. Every value is uint32, int64 or float32; `uint32(...)` around each 32-bit result keeps LLVM on
32-bit registers and keeps Numba's uint64 + int64 = float64 rule out of reach (a test looks for stray f64 in the PTX).

A test tree can replace every name here by an emulation, which is how the kernels run on a machine without a GPU.
Importing this module imports Numba.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

# None of these ships type information; importing them by name keeps the rest of this module strictly typed.
ir: Any = importlib.import_module("llvmlite.ir")
cuda: Any = importlib.import_module("numba.cuda")
cgutils: Any = importlib.import_module("numba.cuda.cgutils")
types: Any = cuda.types
intrinsic: Any = importlib.import_module("numba.cuda.extending").intrinsic

_I1, _I8, _I16, _I32 = (ir.IntType(bits) for bits in (1, 8, 16, 32))
_F32 = ir.FloatType()
_GLOBAL, _SHARED = 1, 3
_FULL_WARP = 0xFFFFFFFF

uint32 = cast(Callable[[int], int], types.uint32)
int64 = cast(Callable[[int], int], types.int64)

Words2 = tuple[int, int]
Words4 = tuple[int, int, int, int]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def device(function: _Function) -> _Function:
    """Mark a helper that kernels call; it is always inlined."""
    return cast(_Function, cuda.jit(device=True, inline="always")(function))


# One emitter per arity, because Numba reads the arity off the Python signature of an intrinsic's typing function.
def _emitter(result: Any, arguments: Sequence[Any], emit: Callable[..., Any]) -> Any:
    signature = result(*arguments)

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lowered = emit(builder, *values)
        return context.get_dummy_value() if lowered is None else lowered

    return signature, lower


def _intrinsic(result: Any, arguments: Sequence[Any], emit: Callable[..., Any]) -> Any:
    match len(arguments):
        case 0:
            return intrinsic(lambda typingctx: _emitter(result, arguments, emit))
        case 1:
            return intrinsic(lambda typingctx, a: _emitter(result, arguments, emit))
        case 2:
            return intrinsic(lambda typingctx, a, b: _emitter(result, arguments, emit))
        case 3:
            return intrinsic(lambda typingctx, a, b, c: _emitter(result, arguments, emit))
        case 5:
            return intrinsic(lambda typingctx, a, b, c, d, e: _emitter(result, arguments, emit))
    raise AssertionError(f"no intrinsic of {len(arguments)} arguments is defined")


def _pointer(builder: Any, address: Any, pointee: Any, space: int) -> Any:
    return builder.inttoptr(address, pointee.as_pointer(space))


def _load(bits: int, space: int) -> Any:
    def emit(builder: Any, address: Any) -> Any:
        value = builder.load(_pointer(builder, address, ir.IntType(bits), space), align=bits // 8)
        return value if bits == 32 else builder.zext(value, _I32)

    return _intrinsic(types.uint32, [types.int64 if space == _GLOBAL else types.uint32], emit)


def _load_vector(count: int, space: int) -> Any:
    def emit(builder: Any, address: Any) -> Any:
        vector = builder.load(_pointer(builder, address, ir.VectorType(_I32, count), space), align=4 * count)
        parts = [builder.extract_element(vector, ir.Constant(_I32, index)) for index in range(count)]
        return cgutils.pack_array(builder, parts)

    address_type = types.int64 if space == _GLOBAL else types.uint32
    return _intrinsic(types.UniTuple(types.uint32, count), [address_type], emit)


def _store(bits: int, space: int) -> Any:
    def emit(builder: Any, address: Any, value: Any) -> None:
        narrow = value if bits == 32 else builder.trunc(value, ir.IntType(bits))
        builder.store(narrow, _pointer(builder, address, ir.IntType(bits), space), align=bits // 8)

    return _intrinsic(types.void, [types.int64 if space == _GLOBAL else types.uint32, types.uint32], emit)


def _store_vector(count: int, space: int) -> Any:
    vector_type = ir.VectorType(_I32, count)

    def emit(builder: Any, address: Any, *parts: Any) -> None:
        vector = ir.Constant(vector_type, ir.Undefined)
        for index, part in enumerate(parts):
            vector = builder.insert_element(vector, part, ir.Constant(_I32, index))
        builder.store(vector, _pointer(builder, address, vector_type, space), align=4 * count)

    address_type = types.int64 if space == _GLOBAL else types.uint32
    return _intrinsic(types.void, [address_type, *[types.uint32] * count], emit)


def _special_register(name: str) -> Any:
    def emit(builder: Any) -> Any:
        reader = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_I32, []), f"llvm.nvvm.read.ptx.sreg.{name}"
        )
        return builder.call(reader, [])

    return _intrinsic(types.uint32, [], emit)


def _shuffle(mode: int, clamp: int) -> Any:
    def emit(builder: Any, value: Any, operand: Any) -> Any:
        result = ir.LiteralStructType((_I32, _I1))
        shuffler = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(result, [_I32] * 5), "llvm.nvvm.shfl.sync.i32"
        )
        constants = [ir.Constant(_I32, _FULL_WARP), ir.Constant(_I32, mode)]
        return builder.extract_value(builder.call(shuffler, [*constants, value, operand, ir.Constant(_I32, clamp)]), 0)

    return _intrinsic(types.uint32, [types.uint32, types.uint32], emit)


def _emit_ballot(builder: Any, predicate: Any) -> Any:
    result = ir.LiteralStructType((_I32, _I1))
    voter = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [_I32, _I32, _I1]), "llvm.nvvm.vote.sync"
    )
    ballot_mode = ir.Constant(_I32, 3)
    return builder.extract_value(builder.call(voter, [ir.Constant(_I32, _FULL_WARP), ballot_mode, predicate]), 0)


def _emit_warp_sync(builder: Any) -> None:
    barrier = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [_I32]), "llvm.nvvm.bar.warp.sync"
    )
    builder.call(barrier, [ir.Constant(_I32, _FULL_WARP)])


def _emit_popcount(builder: Any, value: Any) -> Any:
    counter = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, [_I32]), "llvm.ctpop.i32")
    return builder.call(counter, [value])


def _emit_global_add(builder: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("add", _pointer(builder, address, _I32, _GLOBAL), value, "monotonic")


def _emit_shared_add(builder: Any, address: Any, value: Any) -> None:
    builder.atomic_rmw("add", _pointer(builder, address, _I32, _SHARED), value, "monotonic")


def _emit_shared_or(builder: Any, address: Any, value: Any) -> None:
    builder.atomic_rmw("or", _pointer(builder, address, _I32, _SHARED), value, "monotonic")


def _assembly(result: Any, arguments: Sequence[Any], text: str, constraints: str) -> Any:
    def emit(builder: Any, *values: Any) -> Any:
        llvm = {types.uint32: _I32, types.float32: _F32}
        function = ir.FunctionType(llvm[result], [llvm[argument] for argument in arguments])
        return builder.call(ir.InlineAsm(function, text, constraints), list(values))

    return _intrinsic(result, arguments, emit)


@functools.cache
def shared_region(name: str, size_bytes: int) -> Callable[[], int]:
    """A 16-byte aligned block of shared memory; calling the result inside a kernel gives its address as uint32."""

    def emit(builder: Any) -> Any:
        region = builder.module.globals.get(name)
        if region is None:
            region = cgutils.add_global_variable(builder.module, ir.ArrayType(_I8, size_bytes), name, _SHARED)
            region.initializer = ir.Constant(ir.ArrayType(_I8, size_bytes), ir.Undefined)
            region.align = 16
        return builder.ptrtoint(region, _I32)

    region_address = _intrinsic(types.uint32, [], emit)
    SHARED_REGIONS[region_address] = (name, size_bytes)
    return cast(Callable[[], int], region_address)


SHARED_REGIONS: dict[Any, tuple[str, int]] = {}
"""Region intrinsic -> (name, bytes); an emulation needs it to allocate the same memory."""

Load = Callable[[int], int]
Store = Callable[[int, int], None]

load_u8: Load = _load(8, _GLOBAL)
load_u16: Load = _load(16, _GLOBAL)
load_u32: Load = _load(32, _GLOBAL)
load_u32x2: Callable[[int], Words2] = _load_vector(2, _GLOBAL)
load_u32x4: Callable[[int], Words4] = _load_vector(4, _GLOBAL)
store_u8: Store = _store(8, _GLOBAL)
store_u16: Store = _store(16, _GLOBAL)
store_u32: Store = _store(32, _GLOBAL)
store_u32x2: Callable[[int, int, int], None] = _store_vector(2, _GLOBAL)
store_u32x4: Callable[[int, int, int, int, int], None] = _store_vector(4, _GLOBAL)

shared_load_u8: Load = _load(8, _SHARED)
shared_load_u16: Load = _load(16, _SHARED)
shared_load_u32: Load = _load(32, _SHARED)
shared_load_u32x2: Callable[[int], Words2] = _load_vector(2, _SHARED)
shared_load_u32x4: Callable[[int], Words4] = _load_vector(4, _SHARED)
shared_store_u8: Store = _store(8, _SHARED)
shared_store_u16: Store = _store(16, _SHARED)
shared_store_u32: Store = _store(32, _SHARED)
shared_store_u32x2: Callable[[int, int, int], None] = _store_vector(2, _SHARED)
shared_store_u32x4: Callable[[int, int, int, int, int], None] = _store_vector(4, _SHARED)
global_add_u32: Callable[[int, int], int] = _intrinsic(types.uint32, [types.int64, types.uint32], _emit_global_add)
"""Adds atomically; returns what was there before."""
shared_add_u32: Store = _intrinsic(types.void, [types.uint32, types.uint32], _emit_shared_add)
shared_or_u32: Store = _intrinsic(types.void, [types.uint32, types.uint32], _emit_shared_or)

thread_index: Callable[[], int] = _special_register("tid.x")
block_size: Callable[[], int] = _special_register("ntid.x")
block_index: Callable[[], int] = _special_register("ctaid.x")
block_count: Callable[[], int] = _special_register("nctaid.x")

# shfl.sync modes and clamp values as CUDA's own headers pass them: idx and bfly clamp at lane 31, up at lane 0.
shuffle: Callable[[int, int], int] = _shuffle(0, 31)
shuffle_up: Callable[[int, int], int] = _shuffle(1, 0)
shuffle_xor: Callable[[int, int], int] = _shuffle(3, 31)
ballot: Callable[[bool], int] = _intrinsic(types.uint32, [types.boolean], _emit_ballot)
warp_sync: Callable[[], None] = _intrinsic(types.void, [], _emit_warp_sync)
popcount: Load = _intrinsic(types.uint32, [types.uint32], _emit_popcount)

# Each is one PTX instruction with its rounding named, so that no multiply is ever fused into an add and the NumPy
# reference agrees bit for bit.
f32_from_bits: Callable[[int], float] = _intrinsic(
    types.float32, [types.uint32], lambda builder, bits: builder.bitcast(bits, _F32)
)
f32_bits: Callable[[float], int] = _intrinsic(
    types.uint32, [types.float32], lambda builder, value: builder.bitcast(value, _I32)
)
mul_f32: Callable[[float, float], float] = _assembly(
    types.float32, [types.float32, types.float32], "mul.rn.f32 $0, $1, $2;", "=f,f,f"
)
add_f32: Callable[[float, float], float] = _assembly(
    types.float32, [types.float32, types.float32], "add.rn.f32 $0, $1, $2;", "=f,f,f"
)
div_f32: Callable[[float, float], float] = _assembly(
    types.float32, [types.float32, types.float32], "div.rn.f32 $0, $1, $2;", "=f,f,f"
)
byte_permute: Callable[[int, int, int], int] = _assembly(
    types.uint32, [types.uint32, types.uint32, types.uint32], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"
)
"""Byte i of the result is byte (nibble i of the selector) of the eight bytes of a (0..3) and b (4..7)."""
round_to_i32: Callable[[float], int] = _assembly(types.uint32, [types.float32], "cvt.rni.s32.f32 $0, $1;", "=r,f")
floor_to_i32: Callable[[float], int] = _assembly(types.uint32, [types.float32], "cvt.rmi.s32.f32 $0, $1;", "=r,f")
f32_from_i32: Callable[[int], float] = _assembly(types.float32, [types.uint32], "cvt.rn.f32.s32 $0, $1;", "=f,r")
f32_from_half: Callable[[int], float] = _assembly(
    types.float32,
    [types.uint32],
    "{ .reg .b16 half, upper; mov.b32 {half, upper}, $1; cvt.f32.f16 $0, half; }",
    "=f,r",
)
half_from_f32: Callable[[float], int] = _assembly(
    types.uint32,
    [types.float32],
    "{ .reg .b16 half; cvt.rn.f16.f32 half, $1; cvt.u32.u16 $0, half; }",
    "=r,f",
)
