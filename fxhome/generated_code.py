"""Call a function before every statement of Inductor's generated code that may allocate.

    buf0 = empty_strided_cuda(...)             at(0)
    triton_kernel.run(arg, buf0, ...)          buf0 = empty_strided_cuda(...)
    buf1 = extern_kernels.convolution(...)     triton_kernel.run(arg, buf0, ...)
    return (buf0, buf1)                        at(1)
                                               buf1 = extern_kernels.convolution(...)
                                               at(2)
                                               return (buf0, buf1)

Only the functions that run the graph are compiled again, from the generated file, in the module's own globals; kernels
are not. The module and what others hold of it stay as they are.
"""

from __future__ import annotations

import ast
import functools
import re
import types
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

_AT = "_fxhome_at"
_MAKE = "_fxhome_make"
_HARMLESS = frozenset(
    {
        "assert_alignment",
        "assert_size_stride",
        "assert_size_stride_grouped",
        "assert_tensor_metadata",
        "get_raw_stream",
        "int",
        "len",
        "max",
        "min",
        "reinterpret_tensor",
        # Methods: a kernel's start, and what the prologue does.
        "_DeviceGuard",
        "clear",
        "run",
        "set_device",
        "size",
        "stride",
    }
)
_HARMLESS_PATTERN = re.compile(r"partition_\d+|cpp_fused_\w*")
Hook = Callable[[int], None]


class HookError(Exception):
    """Generated code of a kind that is not known: nothing is hooked."""


def generated(compiled: Any) -> tuple[Callable[..., Any], Callable[[Callable[..., Any]], None]]:
    """What runs inside a graph that Inductor compiled, and how to put something else there.

    Where inputs may be misaligned, Inductor calls it through a closure that copies those. Raises HookError for any
    other.
    """
    call = compiled.current_callable
    function = getattr(call, "__func__", call)
    if isinstance(function, types.FunctionType) and function.__closure__ is not None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        if "model" not in cells or not callable(cells["model"].cell_contents):
            raise HookError(f"generated code is called through {function.__qualname__}, which is not known")
        return cells["model"].cell_contents, functools.partial(setattr, cells["model"], "cell_contents")
    return call, functools.partial(setattr, compiled, "current_callable")


def hook(
    call: Callable[..., Any], at: Hook, first: int, only: Container[int] | None = None
) -> tuple[Callable[..., Any], int]:
    """The callable that Inductor made, with hooks numbered from `first`; and the number behind the last one.

    `at` gets the number of a hook; each is met at most once per call, the last one before the function returns. Of
    those that are not among `only` (None: all are) nothing but the number is left.
    Raises HookError where `call` is neither a function nor a Runner's method, or its source is not to be had.
    """
    function = getattr(call, "__func__", call)
    runner = getattr(call, "__self__", None)
    if not isinstance(function, types.FunctionType) or function.__closure__ is not None:
        raise HookError(f"generated code is called through {type(call).__name__}; expected a function of its module")
    partitions = list(getattr(runner, "partitions", ()))
    hooked = []
    for partition in partitions:
        if not isinstance(partition, types.FunctionType):
            raise HookError(f"a partition of generated code is a {type(partition).__name__}; expected a function")
        rewritten, first = _rewritten(partition, at, first, only)
        hooked.append(rewritten)
    rewritten, first = _rewritten(function, at, first, only)
    if runner is None:
        return rewritten, first
    return types.MethodType(rewritten, type(runner)(hooked)), first


def _rewritten(
    function: types.FunctionType, at: Hook, first: int, only: Container[int] | None
) -> tuple[types.FunctionType, int]:
    path = function.__code__.co_filename
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise HookError(f"the generated file {path} cannot be read again: {error}") from None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name == function.__name__
        and node.lineno == function.__code__.co_firstlineno
    ]
    if len(found) != 1:
        raise HookError(f"{path} has no function {function.__name__} at line {function.__code__.co_firstlineno}")
    definition = found[0]
    definition.body, behind = _with_hooks(definition.body, first, only)
    make = ast.FunctionDef(
        name=_MAKE,
        args=ast.arguments(
            posonlyargs=[], args=[ast.arg(arg=_AT)], kwonlyargs=[], kw_defaults=[], defaults=[], vararg=None, kwarg=None
        ),
        body=[definition, ast.Return(value=ast.Name(id=definition.name, ctx=ast.Load()))],
        decorator_list=[],
    )
    if hasattr(make, "type_params"):
        make.type_params = []
    module = ast.fix_missing_locations(ast.Module(body=[make], type_ignores=[]))
    made: dict[str, Any] = {}
    exec(compile(module, path, "exec"), function.__globals__, made)
    rewritten: types.FunctionType = made[_MAKE](at)
    return rewritten, behind


def _with_hooks(body: Sequence[ast.stmt], first: int, only: Container[int] | None) -> tuple[list[ast.stmt], int]:
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.With):
            statement.body, first = _with_hooks(statement.body, first, only)
        elif isinstance(statement, ast.Return) or may_allocate(statement):
            if only is None or first in only:
                call = ast.Call(func=ast.Name(id=_AT, ctx=ast.Load()), args=[ast.Constant(value=first)], keywords=[])
                found.append(ast.copy_location(ast.Expr(value=call), statement))
            first += 1
        found.append(statement)
    return found, first


def may_allocate(statement: ast.stmt) -> bool:
    """Whether a statement calls anything that is not known to take no device memory."""
    return any(isinstance(node, ast.Call) and not _is_harmless(node.func) for node in ast.walk(statement))


def _is_harmless(called: ast.expr) -> bool:
    if isinstance(called, ast.Subscript):  # self.partitions[0](...): hooked inside
        return isinstance(called.value, ast.Attribute) and called.value.attr == "partitions"
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    return name in _HARMLESS or _HARMLESS_PATTERN.fullmatch(name) is not None
