"""Rows of the codec benchmark, sections that fail alone, and the Markdown they end up in."""

from __future__ import annotations

import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fxhome.cuda_kernels import raise_if_corrupt


@dataclass
class Report:
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, section: str, case: str, **values: Any) -> None:
        row: dict[str, Any] = {"section": section, "case": case}
        row.update({key: round(value, 3) if isinstance(value, float) else value for key, value in values.items()})
        self.rows.append(row)
        print("  " + "  ".join(f"{key}={value}" for key, value in row.items()), flush=True)

    def section(self, name: str, body: Callable[[], None]) -> None:
        """Run one section; a failure is reported and does not stop the rest."""
        start = time.perf_counter()
        print(f"== {name}", flush=True)
        try:
            body()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            raise_if_corrupt()
        except Exception:
            text = traceback.format_exc()
            print(text, flush=True)
            self.failures.append(f"{name}: {text.strip().splitlines()[-1]}")
            self.add(name, "FAILED", error=text.strip().splitlines()[-1])
        print(f"   {time.perf_counter() - start:.1f} s", flush=True)


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def environment() -> dict[str, str]:
    packages = ("torch", "numba", "numba-cuda", "numpy", "nvidia-nvcomp-cu13")
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "command": "python -m " + " ".join(["benchmarks.codecs", *sys.argv[1:]]),
        **{name: package_version(name) for name in packages},
    }


def as_markdown(report: Report, facts: dict[str, str]) -> str:
    lines = ["# Codecs", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    for section in dict.fromkeys(row["section"] for row in report.rows):
        rows = [row for row in report.rows if row["section"] == section]
        columns = list(dict.fromkeys(key for row in rows for key in row if key != "section"))
        lines += [f"## {section}", "", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
        lines.append("")
    lines += ["## failed sections", "", *(f"- {failure}" for failure in report.failures or ["none"]), ""]
    return "\n".join(lines)
