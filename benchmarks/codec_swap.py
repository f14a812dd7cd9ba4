"""Swap latency of whole training steps with real activations: all saved tensors swapped, codecs on against off.

Lossless means that loss and gradients have the same bits: where the backward asks a rectified tensor for no values (a
pooling or a concatenation reads it, no convolution), one bit per element is moved; `values` moves every tensor whole.

Each network is trained for 200 steps on crops of scikit-learn's two sample photographs; then one step is traced once
per precision (fp32; bf16 autocast) and run as it is, with every saved tensor swapped plainly, and with the codecs
(lossless; with lossy ones besides). Swap latency is the time of all copies and codec kernels, hidden or not, from
events on the streams that they run on, with the host far ahead of the device; it is told apart by what the tensors are:
sparse (floats that a rectifier made, or pooling or dropout after one), dense (other floats), other (masks, indices).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from benchmarks.codec_host import step_cost
from benchmarks.codec_placed import SWAPPED, SWAPPED_ENCODED, Placed, capture_joint, place
from fxhome.cuda_kernels import dispatch
from fxhome.device import DeviceProfile, cached_profile
from fxhome.passes.torch_compat import boxed_callable
from fxhome.runtime import codec_ops, codec_sites, transfer

NETWORKS = ("vgg16", "resnet50", "squeezenet1_1", "alexnet", "mobilenet_v2", "densenet121")
CLASSES = 8
KINDS = ("sparse", "dense", "other")
SLEEP_CYCLES_PER_MS = 1.7e6


class Variant(NamedTuple):
    """The placements that a storage may take, best first; the lossy codec; whether masks may stand for values."""

    order: tuple[int, ...]
    lossy: bool | str = False
    masks: bool = True


BASES = ("kept", "plain")
VARIANTS = {
    "kept": Variant(()),
    "plain": Variant(SWAPPED),
    "lossless": Variant(SWAPPED_ENCODED),
    "lossless values": Variant(SWAPPED_ENCODED, masks=False),
    "lossy int8": Variant(SWAPPED_ENCODED, "int8"),
    "lossy int4": Variant(SWAPPED_ENCODED, "int4"),
}
COMPRESSED = tuple(variant for variant in VARIANTS if variant not in BASES)


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
        self.mixed = True

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.mixed):
            scores = self.network(x)
        return nn.functional.cross_entropy(scores.float(), y)


def trained(name: str, batch: int, size: int, steps: int, device: torch.device) -> tuple[WithLoss, Any, float]:
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


Span = tuple[str, torch.cuda.Event, torch.cuda.Event]


@contextmanager
def transfer_times(kind: Callable[[], str]) -> Iterator[list[Span]]:
    """Events around every copy and every codec kernel of the block, each counted once, with the kind at that time."""
    spans: list[Span] = []
    streams: dict[int, Any] = {}

    def spanned(call: Callable[..., Any], stream_of: Callable[..., int | None]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            handle = stream_of(*arguments)
            if handle is None:
                stream = torch.cuda.current_stream()
            elif handle == 0:
                stream = torch.cuda.default_stream()
            else:
                stream = streams.setdefault(handle, torch.cuda.ExternalStream(handle))
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            result = call(*arguments)
            end.record(stream)
            spans.append((kind(), start, end))
            return result

        return timed

    kernel_class: Any = dispatch.PreparedKernel
    queue_class: Any = transfer._CopyQueue
    runtime: Any = codec_ops
    copy, run, launch = queue_class.copy, queue_class.run, kernel_class.__call__
    moves = {name: getattr(runtime, name) for name in ("copy_to_host", "copy_to_device", "copy_overflow", "copy_raw")}

    def timed_copy(queue: Any, target: Any, source: Any, slot: Any) -> Any:
        def work(_: int) -> None:
            spanned(lambda: target.copy_(source, True), lambda: None)()

        return run(queue, work, slot)

    queue_class.copy = timed_copy
    kernel_class.__call__ = spanned(launch, lambda _, stream, *__: stream)
    runtime.copy_to_host = spanned(moves["copy_to_host"], lambda *arguments: arguments[3])
    runtime.copy_to_device = spanned(moves["copy_to_device"], lambda *arguments: arguments[3])
    runtime.copy_overflow = spanned(moves["copy_overflow"], lambda *arguments: arguments[1])
    runtime.copy_raw = spanned(moves["copy_raw"], lambda *arguments: None)
    try:
        yield spans
    finally:
        queue_class.copy, kernel_class.__call__ = copy, launch
        for name, move in moves.items():
            setattr(runtime, name, move)


class Kinds(fx.Interpreter):
    """Runs a graph and says of which kind the storage is that the present node moves."""

    def __init__(self, module: fx.GraphModule, kinds: dict[str, str], present: list[str]) -> None:
        super().__init__(module)
        self.kinds = kinds
        self.present = present

    def run_node(self, n: fx.Node) -> Any:
        """Note the kind."""
        name = str(n.meta.get("fxhome_source", ""))
        for suffix in ("_host", "_encoded"):  # what is moved may be the encoded form of what is meant
            name = name if name in self.kinds else name.rsplit(suffix, 1)[0]
        self.present[0] = self.kinds.get(name, "other")
        return super().run_node(n)


Run = Callable[[list[Any]], Any]


class Step:
    """One training step of a placed graph."""

    def __init__(self, placed: Placed, inputs: list[Any], num_fwd_outputs: int) -> None:
        self.placed = placed
        self.inputs = inputs
        self.num_fwd_outputs = num_fwd_outputs
        self.waiting = [node.meta["val"] for node in placed.backward.graph.nodes if node.op == "placeholder"]
        self.compiled: tuple[Run, Run] = (boxed_callable(placed.forward), boxed_callable(placed.backward))

    def __call__(self, forward: Run, backward: Run) -> list[Any]:
        """Run it; gives the gradients."""
        with torch.no_grad():  # as the compiled graphs run: the backward is a graph of its own
            outputs = list(forward(list(self.inputs)))
            arguments = outputs[self.num_fwd_outputs :]
            del outputs
            arguments += [
                torch.ones(tuple(value.shape), dtype=value.dtype, device="cuda")
                for value in self.waiting[len(arguments) :]
            ]
            return list(backward(arguments))

    def gradients(self) -> list[torch.Tensor]:
        """Of a step with fixed random numbers and convolutions that repeat themselves."""
        torch.manual_seed(0)
        torch.backends.cudnn.deterministic = True
        try:
            found = [value for value in self(*self.compiled) if isinstance(value, torch.Tensor)]
        finally:
            torch.backends.cudnn.deterministic = False
        torch.cuda.synchronize()
        return found

    def measure(self, repeats: int) -> dict[str, float]:
        """Median step time, and the medians of all transfer times of a step by kind; all in ms."""
        for _ in range(4):
            self(*self.compiled)
            torch.cuda.synchronize()
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self(*self.compiled)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        present = ["other"]
        graphs = (self.placed.forward, self.placed.backward)
        forward, backward = (Kinds(graph, self.placed.kinds, present).boxed_run for graph in graphs)
        rounds: list[dict[str, float]] = []
        with transfer_times(lambda: present[0]) as spans:
            for _ in range(2):
                spans.clear()
                # The device sleeps while the host queues the step: a span then holds no time of the host's.
                torch.cuda._sleep(int(SLEEP_CYCLES_PER_MS * min(200.0, 30.0 + 2 * statistics.median(times))))
                self(forward, backward)
                torch.cuda.synchronize()
                busy = dict.fromkeys(KINDS, 0.0)
                for kind, start, end in spans:
                    busy[kind] += start.elapsed_time(end)
                rounds.append(busy)
        by_kind = {f"{kind}_ms": statistics.median(busy[kind] for busy in rounds) for kind in KINDS}
        return {"step_ms": statistics.median(times), "swap_ms": sum(by_kind.values()), **by_kind}


def swap_latency(
    networks: tuple[str, ...],
    batch: int,
    size: int,
    steps: int,
    repeats: int,
    seconds: float,
    say: Callable[..., None],
    compressed: tuple[str, ...] = COMPRESSED,
) -> None:
    """One row per network, precision and variant, told to `say(section, case, **values)`; no network is begun after
    `seconds`.

    compressed: which variants are measured besides the two that they are compared with.
    """
    device = torch.device("cuda")
    profile: DeviceProfile = cached_profile(device)
    started = time.perf_counter()
    totals: dict[tuple[str, str, str], float] = {}
    for name in networks:
        begin = time.perf_counter()
        if begin - started > seconds:
            say("swap latency", f"{name}", skipped=f"{seconds:.0f} seconds are over")
            continue
        model, data, loss = trained(name, batch, size, steps, device)
        for precision in ("fp32", "bf16"):
            model.mixed = precision == "bf16"
            joint, num_fwd_outputs, inputs = capture_joint(model, *data)
            base: dict[str, float] = {}
            plain: dict[str, float] = {}
            exact: list[torch.Tensor] = []
            for variant in (*BASES, *compressed):
                codec_sites.clear()
                how = VARIANTS[variant]
                placed = place(joint, num_fwd_outputs, profile, how.order, how.lossy, masks=how.masks)
                step = Step(placed, inputs, num_fwd_outputs)
                found = step.measure(repeats)
                base = found if variant == "kept" else base
                plain = found if variant == "plain" else plain
                for kind in KINDS:
                    key = (precision, variant, kind)
                    totals[key] = totals.get(key, 0.0) + found[f"{kind}_ms"]
                row: dict[str, Any] = {"saved_mib": placed.saved_bytes / 2**20, **found}
                if variant == "plain":
                    exact = step.gradients()
                if variant != "kept" and not how.lossy:
                    # The plain variant is compared with itself: what does not repeat itself proves nothing.
                    row["gradients_identical"] = same_bits(step.gradients(), exact)
                row["exposed_ms"] = found["step_ms"] - base["step_ms"]
                if variant in compressed:
                    row |= reductions(found, plain)
                    row["exposed_less"] = 1 - row["exposed_ms"] / max(1e-9, plain["step_ms"] - base["step_ms"])
                    row["mib_by_codec"] = {key: round(size / 2**20) for key, size in placed.bytes_by_codec.items()}
                    row["sparse_mib_by_codec"] = {key: round(size / 2**20) for key, size in placed.sparse_bytes.items()}
                    row["seen"] = "; ".join(codec_sites.notes(joint_key(placed)))
                say("swap latency", f"{name} {precision} {variant}", **row)
                del placed, step
            del joint, inputs, exact
        say("swap latency", f"{name} total", loss=loss, seconds=time.perf_counter() - begin)
        del model, data
        torch.cuda.empty_cache()
    for precision in ("fp32", "bf16"):
        sums = {
            variant: {f"{kind}_ms": totals.get((precision, variant, kind), 0.0) for kind in KINDS}
            for variant in (*BASES, *compressed)
        }
        for found in sums.values():
            found["swap_ms"] = sum(found.values())
        for variant in compressed:
            say("all networks", f"{precision} {variant}", **sums[variant], **reductions(sums[variant], sums["plain"]))


def same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether all gradients have the same bits; no NaN is equal to itself otherwise."""
    return len(found) == len(expected) and all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(found, expected, strict=True)
    )


def reductions(found: dict[str, float], plain: dict[str, float]) -> dict[str, float]:
    """By how much the codecs reduce swap latency: of the sparse tensors, the dense ones, all."""
    columns = {"sparse_less": "sparse_ms", "dense_less": "dense_ms", "all_less": "swap_ms"}
    return {name: 1 - found[column] / plain[column] for name, column in columns.items() if plain[column]}


def host_cost_of_a_step(name: str, batch: int, size: int, say: Callable[..., None]) -> None:
    """Host microseconds per call of every operator in a step of a network with all saved tensors swapped."""
    device = torch.device("cuda")
    model, data, _ = trained(name, batch, size, 5, device)
    model.mixed = False
    joint, num_fwd_outputs, inputs = capture_joint(model, *data)
    for variant, how in VARIANTS.items():
        codec_sites.clear()
        placed = place(joint, num_fwd_outputs, cached_profile(device), how.order, how.lossy, masks=how.masks)
        step = Step(placed, inputs, num_fwd_outputs)
        for _ in range(4):
            step(*step.compiled)
            torch.cuda.synchronize()
        print(f"-- {name} {variant}", flush=True)
        for row in step_cost(step, step.placed.forward, step.placed.backward, step.compiled):
            say("host cost of a step", f"{name} {variant} {row.pop('operator')}", **row)


def joint_key(placed: Placed) -> str:
    """The graph key under which the codecs of a placed step report; empty where none does."""
    for node in placed.forward.graph.nodes:
        if node.target is codec_ops.encode_op and node.args[4]:
            return str(node.args[4]).rsplit("/", 1)[0]
    return ""
