"""What each command of the command line does: arguments in, a `Result` out.

torch takes seconds to import, so only the commands that need it do, inside their functions.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import fxhome
from fxhome.budget import parse_budget
from fxhome.errors import OptionError
from fxhome.options import Options
from fxhome.placement import Plan, load_plans, plans_document, save_plans
from fxhome.report import render, render_profile, render_run

if TYPE_CHECKING:
    import torch

    from fxhome.device import DeviceProfile
    from fxhome.spec import Workload


@dataclass(frozen=True)
class Result:
    """What a command found out, for machines and for people."""

    document: Callable[[], object]
    show: Callable[[Console], None]


def run(arguments: argparse.Namespace) -> Result:
    """`fxhome run`: raise `FxhomeError` for what the user got wrong."""
    options = _given_options(arguments)
    if arguments.steps < 1:
        raise OptionError(f"--steps {arguments.steps} is not allowed; give an int of at least 1")
    device = str(_device(arguments.device))
    from fxhome import cli_run

    report = cli_run.run(
        cli_run.RunRequest(
            spec=arguments.spec,
            batch_size=arguments.batch_size,
            num_steps=arguments.steps,
            device=device,
            options=options,
            show_progress=True if arguments.progress else None,
        )
    )
    return Result(report.to_json, lambda console: render_run(report, console))


def plan(arguments: argparse.Namespace) -> Result:
    """`fxhome plan`: an estimate for the device or profile that was named."""
    _check_output(arguments.output)
    given = _given_options(arguments)
    if arguments.sweep:
        return _sweep(arguments, given)
    for name in ("budgets", "plot"):
        if getattr(arguments, name) is not None:
            raise OptionError(f"--{name} is for many budgets; give --sweep with it, or --memory-budget for one plan")
    profile = _profile(arguments.device, getattr(arguments, "inner", None))
    workload = _meta_workload(arguments, profile)
    made: Plan = fxhome.plan(workload.model, workload.example_args, device=profile, **given)
    if arguments.output is not None:
        save_plans(arguments.output, (made,))
    return _plans_result((made,), arguments.output)


def _sweep(arguments: argparse.Namespace, given: dict[str, object]) -> Result:
    """`fxhome plan --sweep`: peak against step time over many budgets."""
    for name in ("memory_budget", "policy"):
        if name in given:
            option = "--" + name.replace("_", "-")
            raise OptionError(
                f"{option} {given[name]} and --sweep do not go together: a sweep searches many budgets with policy "
                "pso; choose them with --budgets, or leave --sweep out"
            )
    budgets = [parse_budget(text, name="--budgets") for text in arguments.budgets or ()]
    _check_output(arguments.plot, "--plot")
    from fxhome.sweep import sweep_offline
    from fxhome.sweep_report import check_plot, draw_sweep, render_sweep

    if arguments.plot is not None:
        check_plot(arguments.plot)
    profile = _profile(arguments.device, getattr(arguments, "inner", None))
    workload = _meta_workload(arguments, profile)
    options = Options.from_mapping(given)
    found = sweep_offline(workload.model, tuple(workload.example_args), options, profile, budgets)
    document = {"spec": arguments.spec, "batch_size": workload.batch_size, "sweep": found.to_json()}
    if arguments.plot is not None:
        draw_sweep(found, arguments.plot)
    if arguments.output is not None:
        Path(arguments.output).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def show_sweep(console: Console) -> None:
        render_sweep(found, console)
        _say_written(arguments.plot, console)
        _say_written(arguments.output, console)

    return Result(lambda: document, show_sweep)


def _meta_workload(arguments: argparse.Namespace, profile: DeviceProfile) -> Workload:
    """The model on the meta device, where one of any size costs nothing."""
    import torch

    from fxhome.spec import DEFAULT_BATCH_SIZES, load_workload

    batch_size = DEFAULT_BATCH_SIZES[profile.kind] if arguments.batch_size is None else arguments.batch_size
    return load_workload(arguments.spec, batch_size=batch_size, device=torch.device("meta"), seed=0)


def show(arguments: argparse.Namespace) -> Result:
    """`fxhome show`: read a plan file."""
    return _plans_result(load_plans(arguments.path), None)


def profile(arguments: argparse.Namespace) -> Result:
    """`fxhome profile`: measure a device, and tune the codecs' kernels on a GPU."""
    _check_output(arguments.output)
    device = _device(arguments.device)
    from fxhome.device import measure_profile, with_host_costs

    measured = measure_profile(device)
    for inner in ("aot_eager", "inductor") if device.type == "cuda" else ():
        measured = with_host_costs(measured, device, inner)
    if arguments.output is not None:
        measured.save(arguments.output)

    document = json.loads(measured.to_json())
    tuned = _tune_codecs(device) if device.type == "cuda" else None
    if tuned is not None:
        document["codecs"] = tuned

    def show_profile(console: Console) -> None:
        render_profile(document["device_profile"], console)
        if tuned is not None:
            console.print(f"codecs: {tuned}", markup=False, highlight=False)
        _say_written(arguments.output, console)

    return Result(lambda: document, show_profile)


def _tune_codecs(device: torch.device) -> str:
    """Find the fastest launches of the codecs' kernels on a GPU; what to tell about it."""
    from fxhome.cuda_kernels.autotune import tune_codecs, tuning_keys
    from fxhome.cuda_kernels.errors import CodecUnavailableError
    from fxhome.progress import progress

    try:
        with progress("tuning codecs", total=len(tuning_keys())) as advance:
            return f"tuned, kept in {tune_codecs(device, advance)}"
    except CodecUnavailableError as error:
        return f"not tuned: {error}"


def _plans_result(plans: tuple[Plan, ...], written: str | None) -> Result:
    def show_plans(console: Console) -> None:
        render(plans, console)
        _say_written(written, console)

    return Result(lambda: plans_document(plans), show_plans)


def _say_written(path: str | None, console: Console) -> None:
    if path is not None:
        console.print(f"written to {path}", markup=False, highlight=False)


def _given_options(arguments: argparse.Namespace) -> dict[str, object]:
    """The options that were typed, checked before anything is built."""
    typed = {entry.name: getattr(arguments, entry.name, None) for entry in fields(Options)}
    given = {name: value for name, value in typed.items() if value is not None}
    Options.from_mapping(given)
    return given


def _check_output(path: str | None, option: str = "--output") -> None:
    """Refuse a path that cannot be written before the work is done, not after it."""
    if path is not None and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)):
        raise OptionError(f"{option} {path!r} cannot be written; give a file in a folder that exists and is writable")


def _device(name: str | None) -> torch.device:
    """The device to run on; raise `DeviceError` where it is not there."""
    import torch

    from fxhome.device import resolve_device

    return resolve_device(name if name is not None else "cuda" if torch.cuda.is_available() else "cpu")


def _profile(name: str | None, inner: str | None) -> DeviceProfile:
    """The profile to plan for: a file, or that of a device of this machine (measured once and cached)."""
    from fxhome.device import DeviceProfile, cached_profile

    if name is not None and Path(name).suffix == ".json":
        return DeviceProfile.load(name)
    return cached_profile(_device(name), inner or "inductor")
