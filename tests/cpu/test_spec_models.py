"""Models from torchvision and transformers: on the meta device, so that no test pays for weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from fxhome.errors import SpecError
from fxhome.spec import Workload, load_workload

META = torch.device("meta")
pytest.importorskip("torchvision", reason="needs the extra 'models'")
pytest.importorskip("transformers", reason="needs the extra 'models'")


def load(spec: str, device: torch.device = META) -> Workload:
    return load_workload(spec, batch_size=2, device=device, seed=0)


@pytest.mark.parametrize(
    ("name", "pixels"), [("resnet50", 224), ("inception_v3", 299), ("vit_b_16", 224), ("mobilenet_v2", 224)]
)
def test_torchvision_step(name: str, pixels: int) -> None:
    workload = load(f"torchvision:{name}")

    images, labels = workload.example_args
    assert (images.shape, labels.shape) == ((2, 3, pixels, pixels), (2,))
    assert workload.model(images, labels).shape == ()
    assert all(weight.is_meta for weight in workload.model.parameters())


def test_auxiliary_heads_count_with_their_weight() -> None:
    """inception_v3 returns (logits, auxiliary logits) while training."""
    from fxhome.spec_models import ClassificationLoss

    class TwoHeads(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            return images, 2 * images, None

    images, labels = torch.tensor([[0.0, 1.0]]), torch.tensor([1])
    cross_entropy = torch.nn.functional.cross_entropy
    expected = cross_entropy(images, labels) + 0.4 * cross_entropy(2 * images, labels)

    torch.testing.assert_close(ClassificationLoss(TwoHeads())(images, labels), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_transformers_language_model(name: str) -> None:
    workload = load(f"transformers:{name}")

    tokens, labels = workload.example_args
    assert tokens.shape == labels.shape == (2, 128)
    assert all(weight.is_meta for weight in workload.model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_a_step_is_one_graph(name: str) -> None:
    """Parts of a broken graph are planned apart, which is worse."""
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    workload = load(f"transformers:{name}")
    torch._dynamo.reset()
    torch.compile(workload.model, backend=count)(*workload.example_args)
    assert len(graphs) == 1


def test_transformers_image_classifier() -> None:
    images, labels = load("transformers:vit").example_args

    assert (images.shape, labels.shape) == ((2, 3, 224, 224), (2,))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("torchvision:resnet5", r"torchvision has no classification model 'resnet5' \(did you mean 'resnet50'\?\)"),
        ("torchvision:fasterrcnn_resnet50_fpn", r"torchvision has no classification model .*factory takes any other"),
        (
            "transformers:gpt22",
            r"transformers has no model type 'gpt22' \(did you mean 'gpt2'\?\); give the model_type",
        ),
        ("transformers:t5", r"'t5' is no causal or masked language model and no image classifier; build it in path/to"),
    ],
)
def test_a_model_that_is_not_there_is_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load(spec)


def test_a_configuration_larger_than_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def little_memory() -> Any:
        return SimpleNamespace(available=1024**2)

    monkeypatch.setattr(psutil, "virtual_memory", little_memory)

    with pytest.raises(
        SpecError, match=r"'transformers:gpt2': .* needs 949\.\d\d MiB for .*; 1\.00 MiB are free on cpu"
    ):
        load("transformers:gpt2", device=torch.device("cpu"))
