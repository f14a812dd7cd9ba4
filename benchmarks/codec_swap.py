"""Swap latency of whole training steps with real activations: all saved tensors swapped, codecs on against off.

Each network is trained for 200 steps on crops of scikit-learn's two sample photographs; then one step is traced once
and run as it is, with every saved tensor swapped plainly, and with the codecs (lossless; with lossy ones besides). Swap
latency is the time of all copies and codec kernels, hidden or not, from events on the streams that they run on.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.codec_placed import SWAPPED, SWAPPED_ENCODED, Placed, capture_joint, place
from fxhome.device import DeviceProfile, cached_profile
from fxhome.passes.torch_compat import boxed_callable
from fxhome.runtime import codec_sites, transfer

NETWORKS = ("vgg16", "resnet50", "squeezenet1_1", "alexnet", "mobilenet_v2", "densenet121")
CLASSES = 8
VARIANTS: dict[str, tuple[tuple[int, ...], bool | str]] = {
    "kept": ((), False),
    "plain": (SWAPPED, False),
    "lossless": (SWAPPED_ENCODED, False),
    "lossy int8": (SWAPPED_ENCODED, "int8"),
}


class Photographs:
    """Random crops of two photographs; the class is photograph and quadrant."""

    def __init__(self, size: int, device: torch.device) -> None:
        from sklearn.datasets import load_sample_images  # type: ignore[import-not-found]

        self.size = size
        images = [
            torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 127.5 - 1 for image in load_sample_images().images
        ]
        self.images = [image.to(device) for image in images]
        self.draw = torch.Generator().manual_seed(0)

    def batch(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(images, classes)."""
        crops, labels = [], []
        for _ in range(count):
            label = int(torch.randint(CLASSES, (1,), generator=self.draw))
            image = self.images[label // 4]
            height, width = image.shape[1] // 2, image.shape[2] // 2
            top = int(torch.randint(max(1, height - self.size // 2), (1,), generator=self.draw)) // 2
            left = int(torch.randint(max(1, width - self.size // 2), (1,), generator=self.draw)) // 2
            top += (label % 4) // 2 * (image.shape[1] - height - self.size // 2) // 2
            left += label % 2 * (width // 2)
            top, left = min(top, image.shape[1] - self.size), min(left, image.shape[2] - self.size)
            crops.append(image[:, top : top + self.size, left : left + self.size])
            labels.append(label)
        device = self.images[0].device
        return torch.stack(crops), torch.tensor(labels, device=device)


class WithLoss(nn.Module):
    """A network and its loss, so that the traced step is whole."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(x), y)


def trained(name: str, batch: int, size: int, steps: int, device: torch.device) -> tuple[nn.Module, Any, float]:
    """(model with loss, a batch, the last loss) after `steps` steps of momentum SGD."""
    import torchvision

    torch.manual_seed(0)
    model = WithLoss(getattr(torchvision.models, name)(num_classes=CLASSES)).to(device)
    data = Photographs(size, device)
    batches = [data.batch(batch) for _ in range(8)]
    has_norm = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 if has_norm else 0.005, momentum=0.9)
    loss = torch.zeros(())
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model(*batches[step % len(batches)])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, batches[0], float(loss.detach())


@contextmanager
def transfer_times() -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Events around every copy and every codec kernel of the block, each counted once."""
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    codec_module: Any = importlib.import_module("fxhome.cuda_kernels.codec")
    queue_class: Any = transfer._CopyQueue
    run, launch = queue_class.run, codec_module.launch
    inside: list[int] = []

    def span(work: Callable[[], Any]) -> Any:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = work()
        end.record()
        spans.append((start, end))
        return result

    def timed_run(queue: Any, work: Callable[[], Any], slot: Any) -> Any:
        def counted() -> Any:
            inside.append(1)
            try:
                return span(work)
            finally:
                inside.pop()

        return run(queue, counted, slot)

    def timed_launch(*arguments: Any) -> None:
        if inside:
            launch(*arguments)
        else:
            span(lambda: launch(*arguments))

    queue_class.run, codec_module.launch = timed_run, timed_launch
    try:
        yield spans
    finally:
        queue_class.run, codec_module.launch = run, launch


def measure(placed: Placed, inputs: list[Any], num_fwd_outputs: int, repeats: int) -> dict[str, float]:
    """Median step time, the median of all transfer times of a step, both in ms."""
    forward, backward = boxed_callable(placed.forward), boxed_callable(placed.backward)
    waiting = [node for node in placed.backward.graph.nodes if node.op == "placeholder"]

    def step() -> None:
        outputs = list(forward(list(inputs)))
        arguments = outputs[num_fwd_outputs:]
        del outputs
        arguments += [torch.ones(tuple(node.meta["val"].shape), device="cuda") for node in waiting[len(arguments) :]]
        backward(arguments)

    for _ in range(4):
        step()
        torch.cuda.synchronize()
    times, busy = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    with transfer_times() as spans:
        for _ in range(3):
            spans.clear()
            step()
            torch.cuda.synchronize()
            busy.append(sum(start.elapsed_time(end) for start, end in spans))
    return {"step_ms": statistics.median(times), "swap_ms": statistics.median(busy)}


def swap_latency(
    networks: tuple[str, ...], batch: int, size: int, steps: int, repeats: int, say: Callable[..., None]
) -> None:
    """One row per network and variant, told to `say(section, case, **values)`."""
    device = torch.device("cuda")
    profile: DeviceProfile = cached_profile(device)
    for name in networks:
        begin = time.perf_counter()
        model, data, loss = trained(name, batch, size, steps, device)
        joint, num_fwd_outputs, inputs = capture_joint(model, *data)
        base: dict[str, float] = {}
        plain: dict[str, float] = {}
        for variant, (order, lossy) in VARIANTS.items():
            codec_sites.clear()
            placed = place(joint, num_fwd_outputs, profile, order, lossy)
            found = measure(placed, inputs, num_fwd_outputs, repeats)
            base = found if variant == "kept" else base
            plain = found if variant == "plain" else plain
            row: dict[str, Any] = {"loss": loss, "saved_mib": placed.saved_bytes / 2**20, **found}
            row["exposed_ms"] = found["step_ms"] - base["step_ms"]
            if variant not in ("kept", "plain"):
                row["swap_reduced_by"] = 1 - found["swap_ms"] / plain["swap_ms"]
                row["exposed_reduced_by"] = 1 - row["exposed_ms"] / max(1e-9, plain["step_ms"] - base["step_ms"])
                row["mib_by_codec"] = {key: round(size / 2**20) for key, size in placed.bytes_by_codec.items()}
                row["seen"] = "; ".join(codec_sites.notes(joint_key(placed)))
            say("swap latency", f"{name} {variant}", **row)
            del placed
        say("swap latency", f"{name} total", seconds=time.perf_counter() - begin)
        del model, data, joint, inputs
        torch.cuda.empty_cache()


def joint_key(placed: Placed) -> str:
    """The graph key under which the codecs of a placed step report; empty where none does."""
    for node in placed.forward.graph.nodes:
        if len(node.args) == 5 and isinstance(node.args[4], str):
            return node.args[4].rsplit("/", 1)[0]
    return ""
