"""SPEC: what is built, and that each wrong SPEC gives one SpecError with the place, the value and the way out."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from fxhome.errors import SpecError
from fxhome.spec import DEFAULT_BATCH_SIZES, Workload, load_workload

CPU = torch.device("cpu")

FACTORY = """
    import torch
    from torch import nn

    def factory(batch_size):
        return nn.Linear(4, 3), (torch.randn(batch_size, 4),)

    def dictionary(batch_size):
        class Model(nn.Module):
            def forward(self, x, scale, mode):
                return {"a": x * scale, "b": (x.long(), x.half())}
        return Model(), [torch.ones(batch_size, 2), 3, "mode"]

    def with_loss(batch_size):
        class Output(dict):
            loss = torch.tensor(7.0)
        class Model(nn.Module):
            def forward(self, x):
                return Output()
        return Model(), (torch.ones(batch_size),)

    def integers(batch_size):
        class Model(nn.Module):
            def forward(self, x):
                return x.long()
        return Model(), (torch.ones(batch_size),)

    def only_model(batch_size):
        return nn.Linear(4, 3)

    def nothing(batch_size):
        pass

    def swapped(batch_size):
        return (torch.randn(batch_size, 4),), nn.Linear(4, 3)

    def bare_tensor(batch_size):
        return nn.Linear(4, 3), torch.randn(batch_size, 4)

    def number(batch_size):
        return nn.Linear(4, 3), 4

    def failing(batch_size):
        size = 1 / (batch_size - 2)
        return size

    CONSTANT = 3
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "net.py"
    file.write_text(textwrap.dedent(FACTORY), encoding="utf-8")
    return file


def load(spec: str, batch_size: int | None = 2, seed: int = 0, device: torch.device = CPU) -> Workload:
    return load_workload(spec, batch_size=batch_size, device=device, seed=seed)


def test_a_factory_gives_a_scalar_loss(path: Path) -> None:
    workload = load(f"{path}:factory", batch_size=5)

    loss = workload.model(*workload.example_args)

    assert (workload.batch_size, workload.example_args[0].shape, loss.shape) == (5, (5, 4), ())
    assert workload.model.training
    loss.backward()
    assert all(weight.grad is not None for weight in workload.model.parameters())


def test_outputs_of_any_structure_are_reduced(path: Path) -> None:
    """Every floating tensor counts by its mean; the integer one has none."""
    workload = load(f"{path}:dictionary")

    assert workload.model(*workload.example_args).item() == 3.0 + 1.0


def test_a_loss_of_the_model_itself_is_taken(path: Path) -> None:
    workload = load(f"{path}:with_loss")

    assert workload.model(*workload.example_args).item() == 7.0


def test_the_same_seed_gives_the_same_step(path: Path) -> None:
    first, second, other = (load(f"{path}:factory", seed=seed) for seed in (1, 1, 2))

    losses = [workload.model(*workload.example_args).item() for workload in (first, second, other)]
    assert losses[0] == losses[1] != losses[2]


def test_a_factory_finds_the_modules_beside_it(path: Path) -> None:
    (path.parent / "neighbour_of_net.py").write_text("SIZE = 6\n", encoding="utf-8")
    path.write_text("from neighbour_of_net import SIZE\n" + path.read_text(encoding="utf-8"), encoding="utf-8")

    assert load(f"{path}:factory").batch_size == 2


def test_the_default_batch_is_that_of_the_device(path: Path) -> None:
    assert load(f"{path}:factory", batch_size=None).batch_size == DEFAULT_BATCH_SIZES["cpu"]


def test_a_model_with_no_floating_output_is_refused_when_it_runs(path: Path) -> None:
    workload = load(f"{path}:integers")

    with pytest.raises(
        SpecError, match=r"net\.py:integers': the model returns no floating-point tensor, so there is no"
    ):
        workload.model(*workload.example_args)


RETURNS = r"factory\(batch_size\) should return \(model, example_args\)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("only_model", rf"the factory returned a Linear; {RETURNS}"),
        ("nothing", rf"the factory returned None; {RETURNS}"),
        ("swapped", rf"the factory's first value is a tuple of 1; {RETURNS}"),
        ("bare_tensor", rf"the factory's second value is one Tensor; write \(tensor,\); {RETURNS}"),
        ("number", rf"the factory's second value is a int; {RETURNS}"),
        ("failing", r"factory\(2\) failed, .*net\.py, line 44: ZeroDivisionError: "),
        ("factori", r"has no function 'factori' \(did you mean 'factory'\?\); it defines factory, dictionary, "),
        ("CONSTANT", r"has no function 'CONSTANT'; it defines factory, "),
    ],
)
def test_a_wrong_factory_is_refused(path: Path, name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load(f"{path}:{name}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "x = 1\ny = 1 / 0\n",
            r"net\.py, line 2: ZeroDivisionError: division by zero; make the file importable with: py",
        ),
        ("def f(:\n", r"net\.py, line 1: SyntaxError: "),
        (
            "import torch\nimport no_such_module\n",
            r"net\.py, line 2: ModuleNotFoundError: No module named 'no_such_mod",
        ),
    ],
)
def test_a_file_that_does_not_import_shows_its_own_line(path: Path, source: str, message: str) -> None:
    path.write_text(source, encoding="utf-8")

    with pytest.raises(SpecError, match=message):
        load(f"{path}:factory")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "resnet50",
            r"SPEC 'resnet50' names no source and model; give torchvision:resnet50, transformers:gpt2 or path",
        ),
        ("torchvision:", r"SPEC 'torchvision:' names no source and model"),
        (":x", r"SPEC ':x' names no source and model"),
        (
            "torchvison:resnet50",
            r"the unknown source 'torchvison' \(did you mean 'torchvision'\?\); give torchvision:res",
        ),
        ("net.txt:factory", r"has the unknown source 'net\.txt'; give"),
        ("none/such.py:factory", r"there is no file 'none/such\.py'; give torchvision:resnet50"),
    ],
)
def test_a_spec_that_names_nothing_is_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load(spec)


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_below_one_is_refused(path: Path, batch_size: int) -> None:
    with pytest.raises(
        SpecError, match=rf"batch size {batch_size} for SPEC .* is not allowed; give an int of at least 1"
    ):
        load(f"{path}:factory", batch_size=batch_size)


@pytest.mark.parametrize("package", ["torchvision", "transformers"])
def test_a_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(
        SpecError, match=rf"needs the package {package}, .*; install it with: pip install 'fxhome\[models\]'"
    ):
        load(f"{package}:anything")
