"""Numba functions that are compiled once per version of this package, and kept.

Numba keeps what it compiled by the contents of the one file that a function stands in. What a function calls, and the
constants that it reads, are compiled into it, and they may stand in other files: after an update that changes only
those, Numba would go on with the old ones. So everything is kept in a directory that is named after the contents of all
files with such functions, and of those that they import from.
"""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from fxhome.device import cache_directory

_HERE = Path(__file__).parent
_MARK = "fxhome.passes.compiled import"
_IMPORTED = re.compile(r"^from fxhome\.passes\.([\w.]+) import", re.MULTILINE)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with a cache that holds no other version of what a function calls; options as there."""

    def decorate(function: Callable[..., Any]) -> Any:
        config: Any = numba.config
        before = config.CACHE_DIR
        # Read when a function is decorated. Where it cannot be written, Numba takes the next place that it knows of.
        config.CACHE_DIR = str(_directory(before))
        try:
            return numba.njit(cache=True, **options)(function)
        finally:
            config.CACHE_DIR = before

    return decorate


def version(root: Path) -> str:
    """Names the contents of the files below `root` that have compiled functions, and of what these import."""
    sources = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    wanted = [name for name, source in sources.items() if _MARK in source]
    known = set(wanted)
    while wanted:
        for imported in _IMPORTED.findall(sources[wanted.pop()]):
            name = imported.replace(".", "/") + ".py"
            if name in sources and name not in known:
                known.add(name)
                wanted.append(name)
    digest = hashlib.sha256()
    for name in sorted(known):
        digest.update(f"{name}\0{sources[name]}\0".encode())
    return digest.hexdigest()[:16]


def _directory(given: str) -> Path:
    """Below what $NUMBA_CACHE_DIR says, else beside this file, else with what was measured."""
    here = _HERE / "__pycache__"
    if not given:
        given = str(here if os.access(here if here.is_dir() else _HERE, os.W_OK) else cache_directory())
    return Path(given) / f"compiled-{_VERSION}"


_VERSION = version(_HERE)
