"""Imports point one way: kernels know nothing of fxhome, passes know no front door. Read from the source, by AST."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BASE = {
    "fxhome.budget",
    "fxhome.device",
    "fxhome.errors",
    "fxhome.host_clock",
    "fxhome.host_costs",
    "fxhome.json_codec",
    "fxhome.options",
    "fxhome.placement",
    "fxhome.plan_text",
    "fxhome.progress",
    "fxhome.units",
}
"""What everything may import, and what imports nothing above itself."""

CODEC_FACTS = {"fxhome.cuda_kernels.codec"}
"""Codec names and rates: all that a pass may know of the kernels."""

OPERATORS = {"fxhome.runtime.ops", "fxhome.runtime.codec_ops"}
"""Operators that the passes insert: all that they may know of the runtime."""


def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts if relative.parts[0] == "fxhome" else ("fxhome", *relative.parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(folder: str) -> list[Path]:
    # fxhome/passes and fxhome/cuda_kernels are links: rglob does not follow them, so each file is met once.
    return sorted((ROOT / folder).rglob("*.py"))


def type_checking_blocks(tree: ast.AST) -> set[ast.AST]:
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    ]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imports(source: str) -> set[str]:
    """Every module of ours that the source imports while running, with `from a import b` as both a and a.b."""
    tree = ast.parse(source)
    skipped = type_checking_blocks(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("fxhome", "passes", "cuda_kernels")}


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported_modules(path: Path) -> set[str]:
    names = {name for name in imports(path.read_text(encoding="utf-8")) if is_module(name)}
    # `from fxhome.passes import facts` names the package only on the way to the module.
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def allowed(module: str, imported: str) -> bool:
    """Whether `module` may import `imported`."""
    if imported.startswith("fxhome.cuda_kernels") and module.startswith("fxhome.cuda_kernels"):
        return True
    if module.startswith("fxhome.cuda_kernels"):
        return False
    if module in BASE:
        measures = ("fxhome.runtime.probe", "fxhome.runtime.host_probe")
        return imported in BASE or (module == "fxhome.device" and imported.startswith(measures))
    if module.startswith("fxhome.passes"):
        facts = imported in BASE | CODEC_FACTS | OPERATORS
        return facts or imported.startswith("fxhome.passes")
    if module.startswith("fxhome.runtime"):
        return imported in BASE or imported.startswith(("fxhome.runtime", "fxhome.cuda_kernels"))
    return True


ALL = [path for folder in ("fxhome", "passes", "cuda_kernels") for path in sources(folder)]


@pytest.mark.parametrize("path", ALL, ids=[str(path.relative_to(ROOT)) for path in ALL])
def test_imports_point_down(path: Path) -> None:
    module = module_of(path)
    wrong = sorted(name for name in imported_modules(path) if not allowed(module, name))

    assert wrong == [], f"{module} must not import {', '.join(wrong)}"


@pytest.mark.parametrize("path", ALL, ids=[str(path.relative_to(ROOT)) for path in ALL])
def test_nobody_imports_the_bare_names(path: Path) -> None:
    """`import passes` works in a checkout and nowhere else."""
    bare = {name for name in imports(path.read_text(encoding="utf-8")) if not name.startswith("fxhome")}

    assert bare == set()


def test_the_base_exists() -> None:
    """A module that moved away must leave the list above."""
    assert {name for name in BASE if not is_module(name)} == set()


@pytest.mark.parametrize(
    ("module", "imported", "is_allowed"),
    [
        ("fxhome.cuda_kernels.bitmask", "fxhome.cuda_kernels.codec", True),
        ("fxhome.cuda_kernels.bitmask", "fxhome.errors", False),
        ("fxhome.errors", "fxhome.passes.facts", False),
        ("fxhome.options", "fxhome.placement", True),
        ("fxhome.passes.facts", "fxhome.placement", True),
        ("fxhome.passes.insert", "fxhome.runtime.ops", True),
        ("fxhome.passes.insert", "fxhome.runtime.transfer", False),
        ("fxhome.passes.insert", "fxhome.backend", False),
        ("fxhome.passes.cost_model", "fxhome.cuda_kernels.codec", True),
        ("fxhome.passes.cost_model", "fxhome.cuda_kernels.bitmask", False),
        ("fxhome.runtime.ops", "fxhome.passes.facts", False),
        ("fxhome.backend", "fxhome.passes.facts", True),
    ],
)
def test_the_rule_itself(module: str, imported: str, is_allowed: bool) -> None:
    assert allowed(module, imported) is is_allowed


def test_imports_are_seen_in_functions_but_not_under_type_checking() -> None:
    source = "\n".join(
        (
            "from typing import TYPE_CHECKING",
            "if TYPE_CHECKING:",
            "    from fxhome.api import plan",
            "def f():",
            "    from fxhome.runtime import ops",
            "import passes.facts",
        )
    )

    assert imports(source) == {"fxhome.runtime", "fxhome.runtime.ops", "passes.facts"}
