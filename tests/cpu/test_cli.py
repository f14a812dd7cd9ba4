"""The command line: exit status, one message for a mistake, JSON alone on stdout. Planning itself is replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxhome
from fxhome import cli, cli_run
from fxhome.cuda_kernels.errors import CodecUnavailableError
from fxhome.errors import GraphRuleError, InfeasibleBudgetError
from fxhome.host_costs import HostCosts
from fxhome.placement import Plan, load_plans
from tests.plan_strategies import EXAMPLE, MIB

FACTORY = """
    import os
    import signal

    import torch
    from torch import nn

    print("a library that prints")

    def factory(batch_size):
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), (torch.randn(batch_size, 16),)

    class Model(nn.Linear):
        def __init__(self, act):
            super().__init__(16, 16)
            self.act = act

        @torch.compiler.disable
        def forward(self, x):
            self.act()

    def wrong():
        raise RuntimeError("the model is wrong")

    def hungry():
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    def killed():
        os.kill(os.getpid(), signal.SIGKILL)

    def failing(batch_size):
        return Model(wrong), (torch.randn(batch_size, 16),)

    def too_large(batch_size):
        return Model(hungry), (torch.randn(batch_size, 16),)

    def too_large_for_the_host(batch_size):
        return Model(killed), (torch.randn(batch_size, 16),)

    def frozen(batch_size):
        return nn.ReLU(), (torch.randn(batch_size, 16),)
"""


class Fast(nn.Module):
    """What `fxhome.optimize` returns, with nothing optimised."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.model = model
        self.plan = plan

    def forward(self, *args: Any) -> Any:
        return self.model(*args)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(textwrap.dedent(FACTORY), encoding="utf-8")
    return f"{path}:factory"


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    EXAMPLE.save(path)
    return str(path)


Calls = list[dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace the planning front doors; collects what they were called with."""
    seen: Calls = []

    def optimize(model: nn.Module, example_args: tuple[Any, ...], **options: Any) -> Fast:
        seen.append({"model": model, "example_args": example_args, **options})
        return Fast(model, EXAMPLE)

    def plan(model: nn.Module, example_args: tuple[Any, ...], **options: Any) -> Plan:
        seen.append({"model": model, "example_args": example_args, **options})
        return EXAMPLE

    monkeypatch.setitem(vars(fxhome), "optimize", optimize)
    monkeypatch.setitem(vars(fxhome), "plan", plan)
    return seen


@pytest.fixture
def profile_file(tmp_path: Path) -> str:
    profile = fxhome.DeviceProfile(
        name="test device",
        kind="cuda",
        d2h_bytes_per_s=5e10,
        h2d_bytes_per_s=5e10,
        duplex_bytes_per_s=7e10,
        copy_latency_us=25.0,
        memory_bytes_per_s=4e12,
        launch_us=5.0,
        flops_per_s=(("bfloat16", 7e14),),
        total_memory_bytes=139 * 1024**3,
        host_memory_bytes=512 * 1024**3,
        versions=(("torch", "2.14.1"),),
    )
    path = tmp_path / "device.json"
    profile.save(path)
    return str(path)


def host_costs(inner: str) -> HostCosts:
    return HostCosts(inner, *[1.0] * (len(dataclasses.fields(HostCosts)) - 2))


@pytest.fixture
def plain_step_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of the plain step's child process runs in this one; to start another takes longer than all it does."""

    class Process:
        exitcode = 0

        def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...]) -> None:
            self.start = functools.partial(target, *args)

        def join(self) -> None:
            torch._dynamo.reset()

    context = types.SimpleNamespace(Process=Process)
    monkeypatch.setattr(cli_run, "multiprocessing", types.SimpleNamespace(get_context=lambda _: context))
    monkeypatch.setattr(cli_run, "_be_first_victim", lambda: None)


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.slow
def test_run_json_is_alone_on_stdout(spec: str, calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    """The plain step really runs, in its child process, with the inner backend."""
    status = cli.main(["run", spec, "--memory-budget", "60%", "--batch-size", "3", "--steps", "1", "--json"])

    out, err = capfd.readouterr()
    report = json.loads(out)
    assert status == 0
    assert "a library that prints" in err
    assert (report["batch_size"], report["device"], report["inner"]) == (3, "cpu", "aot_eager")
    assert report["largest_gradient_difference"] == 0.0
    assert report["plain"]["losses"] == report["planned"]["losses"]
    assert len(report["plain"]["losses"]) == 3
    assert report["plain"]["peak_bytes"] > 0
    assert report["placed_bytes"]["swapped"] == 264 * MIB
    assert report["plan_fingerprint"] == EXAMPLE.fingerprint()
    (call,) = calls
    assert call["memory_budget"] == "60%"
    assert call["example_args"][0].shape == (3, 16)


@pytest.mark.usefixtures("plain_step_here")
def test_run_prints_a_table(spec: str, calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", spec, "--steps", "1", "--progress"]) == 0

    out, err = capfd.readouterr()
    assert "0 (bitwise equal)" in out
    assert "a library that prints" not in out
    assert "training with fxhome" in err
    assert "training with aot_eager alone" in err


def run_plain(spec: str, factory: str, folder: Path) -> tuple[object, str | None]:
    request = cli_run.RunRequest(
        spec=spec.replace(":factory", f":{factory}"),
        batch_size=2,
        num_steps=1,
        device="cpu",
        options={},
        show_progress=None,
    )
    return cli_run.plain_in_child(request, "aot_eager", folder)


@pytest.mark.usefixtures("plain_step_here")
def test_a_plain_step_that_does_not_fit_is_a_result(tmp_path: Path, spec: str) -> None:
    assert run_plain(spec, "too_large", tmp_path) == (None, "does not fit: tried to allocate 80 GiB")


@pytest.mark.slow
def test_a_plain_step_that_the_system_killed_is_a_result(tmp_path: Path, spec: str) -> None:
    reason = "does not fit: the system killed it for its memory"
    assert run_plain(spec, "too_large_for_the_host", tmp_path) == (None, reason)


def test_run_without_anything_to_train(spec: str, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", spec.replace(":factory", ":frozen")]) == 2
    assert "the model has no trainable parameter, so there is nothing to train" in capsys.readouterr().err


@pytest.mark.usefixtures("plain_step_here")
def test_run_with_a_model_that_fails_by_itself(spec: str, calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", spec.replace(":factory", ":failing")]) == 2

    err = capfd.readouterr().err
    assert "the step fails without fxhome too: RuntimeError: the model is wrong; mend the model first" in err
    assert calls == []


def test_plan_is_made_on_meta_tensors(
    spec: str, profile_file: str, tmp_path: Path, calls: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    arguments = ["plan", spec, "--device", profile_file, "--memory-budget", "8GiB", "--seed", "3", "-o", str(output)]
    status = cli.main([*arguments, "--json"])

    assert status == 0
    assert json.loads(capfd.readouterr().out) == {"schema": 1, "plans": [EXAMPLE.to_json()]}
    assert load_plans(output) == (EXAMPLE,)
    (call,) = calls
    assert all(weight.is_meta for weight in call["model"].parameters())
    assert call["example_args"][0].shape == (64, 16)
    assert call["example_args"][0].is_meta
    assert (call["device"].name, call["memory_budget"], call["seed"]) == ("test device", "8GiB", 3)


def test_plan_says_where_it_wrote(spec: str, profile_file: str, tmp_path: Path, calls: Calls, capfd: Any) -> None:
    output = tmp_path / "out.json"

    assert cli.main(["plan", spec, "--device", profile_file, "-o", str(output)]) == 0
    assert f"written to {output}" in capfd.readouterr().out.replace("\n", "")


def test_show(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", plan_file]) == 0
    assert "600.00 MiB" in capsys.readouterr().out


def test_show_json_is_the_file(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", plan_file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path(plan_file).read_text(encoding="utf-8"))


def test_profile(tmp_path: Path, profile_file: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    measured = fxhome.DeviceProfile.load(profile_file)
    asked: list[torch.device] = []

    def measure_profile(device: torch.device) -> fxhome.DeviceProfile:
        asked.append(device)
        return measured

    monkeypatch.setattr("fxhome.device.measure_profile", measure_profile)
    output = tmp_path / "new.json"

    assert cli.main(["profile", "--device", "cpu", "-o", str(output)]) == 0
    assert "test device" in capsys.readouterr().out
    assert fxhome.DeviceProfile.load(output) == measured
    assert cli.main(["profile", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(measured.to_json())
    assert asked == [torch.device("cpu")] * 2


@pytest.mark.parametrize("missing", [False, True])
def test_profile_tunes_the_codecs_of_a_gpu(
    missing: bool, profile_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device, its measurement and its tuner are replaced: what is tested is that they meet, and what is said."""
    asked: list[torch.device] = []

    def tune_codecs(device: torch.device, advance: Callable[[], object]) -> Path:
        asked.append(device)
        advance()
        if missing:
            raise CodecUnavailableError("install numba-cuda")
        return Path("kernels.json")

    monkeypatch.setattr("fxhome.device.resolve_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr("fxhome.device.measure_profile", lambda device: fxhome.DeviceProfile.load(profile_file))
    monkeypatch.setattr("fxhome.cuda_kernels.autotune.tune_codecs", tune_codecs)
    monkeypatch.setattr("fxhome.runtime.host_probe.measure_host_costs", lambda device, inner: host_costs(inner))
    monkeypatch.setattr("fxhome.device.measuring_turn", lambda device: contextlib.nullcontext())

    assert cli.main(["profile", "--device", "cuda", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [costs["inner"] for costs in document["device_profile"]["host"]] == ["aot_eager", "inductor"]
    said = document["codecs"]
    assert said == ("not tuned: install numba-cuda" if missing else "tuned, kept in kernels.json")
    assert asked == [torch.device("cuda", 0)]


MISTAKES = [
    (["show", "none.json"], r"fxhome show: error: plan file 'none.json' cannot be read: No such file"),
    (["run", "torchvision:resnet50", "--policy", "psoo"], "policy='psoo' is not allowed (did you mean 'pso'?)"),
    (["run", "torchvision:resnet50", "--memory-budget", "1"], "1 is one byte, 1.0 is 100 %"),
    (["run", "torchvision:resnet50", "--memory-budget", "-5MB"], "memory_budget='-5MB' is negative"),
    (["run", "torchvision:resnet50", "--memory-budget", "60 parsecs"], "has the unknown unit 'parsecs'"),
    (["run", "torchvision:resnet50", "--memory-budget", "160%"], "'160%' is a share outside (0 %, 100 %]"),
    (["run", "torchvision:resnet50", "--allow", "swp"], "allow='swp' is not allowed (did you mean 'swap'?)"),
    (["run", "torchvision:resnet50", "--steps", "0"], "--steps 0 is not allowed; give an int of at least 1"),
    (["run", "torchvision:resnet50", "--plan", "none.json"], "plan file 'none.json' cannot be read"),
    (["run", "torchvision:resnet50", "--device", "tpu"], "device 'tpu'"),
    (["run", "resnet50"], "SPEC 'resnet50' names no source and model"),
    (["run", "none.py:factory", "--device", "cpu"], "there is no file 'none.py'"),
    (["plan", "torchvision:resnet50", "--device", "none.json"], "device profile 'none.json'"),
    (
        ["plan", "torchvision:resnet50", "-o", "none/plan.json"],
        "--output 'none/plan.json' cannot be written; give a file",
    ),
    (["profile", "-o", "none/device.json"], "--output 'none/device.json' cannot be written"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
@pytest.mark.parametrize("extra", [[], ["--json"]], ids=["text", "json"])
def test_a_mistake_is_one_message(
    arguments: list[str],
    message: str,
    extra: list[str],
    calls: Calls,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status = cli.main([*arguments, *extra])

    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith(f"fxhome {arguments[0]}: error: ")
    assert len(err.splitlines()) == 1
    assert calls == []


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert cli.main(["run", "torchvision:resnet50", "--device", "cuda"]) == 2
    assert "device 'cuda' was asked for and this machine has no usable CUDA device" in capsys.readouterr().err


def test_an_infeasible_budget_is_a_message(
    spec: str, profile_file: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = InfeasibleBudgetError("2 GiB is too small; the smallest is 3 GiB", minimum_bytes=3, budget_bytes=2)
    monkeypatch.setitem(vars(fxhome), "plan", raiser(error))

    assert cli.main(["plan", spec, "--device", profile_file]) == 2
    assert "fxhome plan: error: 2 GiB is too small; the smallest is 3 GiB" in capsys.readouterr().err


def test_a_defect_of_fxhome_keeps_its_traceback(
    spec: str, profile_file: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(fxhome), "plan", raiser(GraphRuleError("broken")))

    with pytest.raises(GraphRuleError, match="broken"):
        cli.main(["plan", spec, "--device", profile_file])


def test_an_interrupt_ends_quietly(plan_file: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("fxhome.cli_commands.load_plans", raiser(KeyboardInterrupt()))

    assert cli.main(["show", plan_file]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "arguments", [[], ["run"], ["dance"], ["run", "x:y", "--seed", "one"], ["run", "x:y", "--sped"]]
)
def test_a_wrong_command_line_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)

    assert caught.value.code == 2
    assert "usage: fxhome" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out == f"fxhome {fxhome.__version__}\n"
