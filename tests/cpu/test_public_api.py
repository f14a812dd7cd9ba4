"""The public face: at most ten names, and an import that touches neither CUDA nor Numba."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import fxhome

PUBLIC = {
    "DeviceProfile",
    "FxhomeError",
    "InfeasibleBudgetError",
    "Options",
    "Placement",
    "Plan",
    "__version__",
    "optimize",
    "plan",
    "plans",
}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_are_pinned() -> None:
    assert set(fxhome.__all__) == PUBLIC
    assert len(fxhome.__all__) == len(PUBLIC) <= 10
    assert set(dir(fxhome)) >= PUBLIC


def test_every_public_name_loads_and_keeps_its_identity() -> None:
    for name in sorted(PUBLIC):
        assert getattr(fxhome, name) is getattr(fxhome, name)


def test_plan_and_plans_stay_functions_whatever_is_imported() -> None:
    """A module called plan or plans would shadow them."""
    code = "\n".join(
        (
            "import pkgutil, fxhome, fxhome.cli, fxhome.cli_commands",
            "names = [module.name for module in pkgutil.iter_modules(fxhome.__path__)]",
            "print('plan' in names, 'plans' in names, callable(fxhome.plan), callable(fxhome.plans))",
        )
    )

    assert run_python(code).split() == ["False", "False", "True", "True"]


def test_an_unknown_name_is_an_attribute_error_that_lists_the_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'optimise'; public names: DeviceProfile, "):
        fxhome.optimise  # noqa: B018  (the look-up is what is tested)


def test_import_loads_no_torch_no_numba() -> None:
    code = "import json, sys, fxhome; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    loaded = json.loads(run_python(code))

    assert "fxhome" in loaded
    assert not {"torch", "numba", "numpy", "rich", "scipy"} & set(loaded)


def test_first_use_of_the_data_classes_starts_no_cuda_and_no_numba() -> None:
    code = "\n".join(
        (
            "import sys, fxhome",
            "fxhome.Plan, fxhome.Options, fxhome.Placement, fxhome.DeviceProfile, fxhome.InfeasibleBudgetError",
            "cuda = 'torch' in sys.modules and sys.modules['torch'].cuda.is_initialized()",
            "print(cuda, 'numba' in sys.modules)",
        )
    )

    assert run_python(code).split() == ["False", "False"]


def test_no_cuda_after_loading_every_public_name() -> None:
    code = (
        "import fxhome, torch; [getattr(fxhome, name) for name in fxhome.__all__]; print(torch.cuda.is_initialized())"
    )

    assert run_python(code).split() == ["False"]


def test_version_is_the_installed_one() -> None:
    importlib_metadata = pytest.importorskip("importlib.metadata")
    try:
        installed = importlib_metadata.version("fxhome")
    except importlib_metadata.PackageNotFoundError:
        pytest.skip("fxhome runs from a checkout that is not installed")

    assert fxhome.__version__ == installed
