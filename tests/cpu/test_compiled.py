"""What Numba keeps is of this version of every file that is compiled into it."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import numba
import pytest

from fxhome.passes import compiled
from fxhome.passes.simulate_timeline import run_program

USER = """
    from fxhome.passes.compiled import compiled
    from fxhome.passes.callee import callee
    @compiled()
    def caller(x):
        return callee(x) + 1
"""
CALLEE = """
    from fxhome.passes.compiled import compiled
    from fxhome.passes.constant import TEN
    @compiled()
    def callee(x):
        return x * TEN
"""


def package(root: Path, ten: str = "10") -> Path:
    for name, source in (("user", USER), ("callee", CALLEE), ("constant", f"TEN = {ten}"), ("other", "X = 1")):
        (root / f"{name}.py").write_text(textwrap.dedent(source))
    return root


def test_what_is_called_or_read_from_another_file_tells_versions_apart(tmp_path: Path) -> None:
    before = compiled.version(package(tmp_path))
    assert compiled.version(package(tmp_path)) == before
    (tmp_path / "other.py").write_text("X = 2")
    assert compiled.version(tmp_path) == before
    assert compiled.version(package(tmp_path, ten="11")) != before
    (tmp_path / "callee.py").write_text((tmp_path / "callee.py").read_text() + "\n")
    assert compiled.version(package(tmp_path)) == before


def loaded(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("is_told", [True, False])
def test_a_caller_does_not_go_on_with_an_old_callee(
    tmp_path: Path, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it would, were the directory not named after both files: this is what Numba does by itself."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    found = []
    for ten in ("10", "11"):
        package(tmp_path, ten)
        if is_told or ten == "10":
            monkeypatch.setattr(compiled, "_VERSION", compiled.version(tmp_path))
        for name in ("constant", "callee", "user"):
            monkeypatch.setitem(sys.modules, f"fxhome.passes.{name}", None)
            loaded(tmp_path / f"{name}.py", f"fxhome.passes.{name}")
        found.append(sys.modules["fxhome.passes.user"].caller(2))
    assert found == [21, 23 if is_told else 21]


def test_what_users_compile_stays_where_it_was() -> None:
    assert "compiled-" not in numba.config.CACHE_DIR
    assert "compiled-" in run_program.stats.cache_path


def test_where_the_package_cannot_be_written_it_is_kept_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))
    assert compiled._directory("").parent.name == "__pycache__"
    monkeypatch.setattr(compiled.os, "access", lambda *_: False)
    assert compiled._directory("").parent == tmp_path
    assert compiled._directory("/given").parent == Path("/given")
