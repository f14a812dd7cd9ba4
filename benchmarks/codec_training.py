"""Training with compressed activations: does it train as well, and what does it save on the way to the host?

    python -m benchmarks.codec_training                       training quality, on the GPU or small on a CPU
    python -m benchmarks.codec_training --through public      the same through the public options, under a tight budget
    python -m benchmarks.codec_training --swap-latency        swap latency of six networks (GPU only)
    python -m benchmarks.codec_training --host-cost           host microseconds of every operator (GPU only)

Training quality: a ReLU network on scikit-learn's digits, a GELU transformer on the bytes of Python's standard library;
three seeds each. By itself every tensor that a codec can take is encoded, which is more than any budget would ask for.
Writes <out>/codec_training_<what>.json and .md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.codec_placed import ENCODED, compile_placed
from benchmarks.codec_swap import COMPRESSED, NETWORKS, host_cost_of_a_step, swap_latency
from fxhome.device import cached_profile

VARIANTS: dict[str, bool | str | None] = {
    "none": None,
    "lossless": False,
    "fp8_e4m3": "fp8_e4m3",
    "int8": "int8",
    "int4": "int4",
}
"""Variant -> the `lossy` that it runs with; None: the stock backend, nothing compressed."""

BARS = {"lossless": (0.0, 0.0), "fp8_e4m3": (0.2, 0.5), "int8": (0.2, 0.5), "int4": (0.5, 1.5)}
"""Variant -> largest loss of accuracy in points, largest increase of the validation loss in per cent."""


class DigitsNet(nn.Module):
    """A convolutional network with ReLU and pooling for 8 x 8 images; returns the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(2 * width * 16, 10),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


class Block(nn.Module):
    """Pre-norm attention and a GELU feed-forward, attention written out so that its tensors are the graph's own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return result


class ByteModel(nn.Module):
    """A byte-level language model; returns the loss of predicting each next byte."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(x) + self.place
        for block in self.blocks:
            hidden = block(hidden, self.mask)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Task:
    """A model, its batches by step, how it is evaluated, and for how many steps it trains."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
    evaluate: Callable[[nn.Module], dict[str, float]]
    steps: int
    learning_rate: float


def digits(device: torch.device, small: bool) -> Task:
    """Half of scikit-learn's digits to train on, half to measure."""
    from sklearn.datasets import load_digits  # type: ignore[import-not-found]

    data = load_digits()
    x = torch.from_numpy(data.images).float()[:, None].to(device) / 8 - 1
    y = torch.from_numpy(data.target).long().to(device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(device)
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    size = 128

    def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed * 100_003 + step)
        chosen = train[torch.randint(len(train), (size,), generator=draw).to(device)]
        return x[chosen], y[chosen]

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, DigitsNet)
        model.eval()
        with torch.no_grad():
            scores = model.body(x[test])
            loss = nn.functional.cross_entropy(scores, y[test])
        model.train()
        return {"accuracy": float((scores.argmax(1) == y[test]).float().mean()) * 100, "loss": float(loss)}

    return Task(lambda: DigitsNet(16 if small else 32), batch, evaluate, 60 if small else 300, 2e-3)


def standard_library(device: torch.device, small: bool) -> Task:
    """Bytes of the standard library's modules; the last tenth is measured on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[: 40 if small else 160])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    split, length, size = len(data) * 9 // 10, 64 if small else 128, 16 if small else 64
    offsets = torch.arange(length + 1, device=device)

    def cut(start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = data[start.to(device)[:, None] + offsets].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed * 100_003 + step)
        return cut(torch.randint(split - length - 1, (size,), generator=draw))

    held_out = torch.arange(split, len(data) - length - 1, (len(data) - split) // (8 * size))[: 8 * size]

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            losses = [float(model(*cut(part))) for part in held_out.split(size)]
        return {"loss": statistics.fmean(losses)}

    width, layers = (64, 2) if small else (128, 3)
    return Task(lambda: ByteModel(width, layers, length), batch, evaluate, 80 if small else 400, 2e-3)


TASKS = {"digits": digits, "standard library": standard_library}


class Quality:
    """Trains every variant of every task and compares with nothing compressed."""

    def __init__(self, arguments: argparse.Namespace, say: Callable[..., None]) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.small = self.device.type == "cpu"
        self.say = say

    def run(self) -> None:
        """All tasks, variants and seeds; several variants at a time, each in a process of its own."""
        chosen = [(name, variant) for name in self.arguments.tasks for variant in self.arguments.variants]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max(1, self.arguments.jobs), mp_context=context) as pool:
            pending = {case: pool.submit(trained_variant, self.arguments, *case) for case in chosen}
            base: dict[str, list[dict[str, float]]] = {}
            for (name, variant), future in pending.items():
                results, encoded, seconds = future.result()
                base.setdefault(name, results)
                row: dict[str, Any] = {key: statistics.fmean(r[key] for r in results) for key in results[0]}
                row["spread"] = max(r["loss"] for r in results) - min(r["loss"] for r in results)
                row |= self.compared(variant, results, base[name])
                self.say(name, variant, **row, encoded=encoded, seconds=seconds)

    def compared(self, variant: str, results: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
        """How far a variant is from nothing compressed, and whether that is within the bar."""
        if variant == "none":
            return {}
        if variant == "lossless":
            same = all(a["trained loss"] == b["trained loss"] and a == b for a, b in zip(results, base, strict=True))
            return {"identical": same, "within": same}
        points, per_cent = BARS[variant]
        if "accuracy" in results[0]:
            lost = statistics.fmean(b["accuracy"] - a["accuracy"] for a, b in zip(results, base, strict=True))
            return {"points lost": lost, "within": lost <= points}
        more = 100 * (statistics.fmean(a["loss"] / b["loss"] for a, b in zip(results, base, strict=True)) - 1)
        return {"loss more %": more, "within": more <= per_cent}

    def train(self, task: Task, variant: str) -> tuple[list[dict[str, float]], str]:
        """(results by seed, what was encoded). One compilation serves all seeds."""
        model = task.build().to(self.device)
        step, describe = self.compiled(task, model, variant)
        steps = self.arguments.steps or task.steps
        results = []
        for seed in range(self.arguments.seeds):
            torch.manual_seed(seed)
            model.load_state_dict(task.build().state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.learning_rate, total_steps=steps)
            recent: list[torch.Tensor] = []
            ends: list[dict[str, float]] = []
            for number in range(steps):
                torch.manual_seed(seed * 1000 + number)
                optimizer.zero_grad(set_to_none=True)
                loss = step(*task.batch(seed, number))
                loss.backward()
                optimizer.step()
                schedule.step()
                recent = [*recent[-9:], loss.detach()]
                # The end of the curve is averaged: a single evaluation on some hundred images is coarse.
                if number >= steps - 5:
                    ends.append(task.evaluate(model))
            result = {key: statistics.fmean(end[key] for end in ends) for key in ends[0]}
            results.append({**result, "trained loss": float(torch.stack(recent).double().mean())})
            print(f"    {variant} seed {seed}: {results[-1]}", flush=True)
        return results, describe()

    def compiled(self, task: Task, model: nn.Module, variant: str) -> tuple[Callable[..., Any], Callable[[], str]]:
        """The training step under a variant, and a function that says what it encodes."""
        lossy = VARIANTS[variant]
        if lossy is None:
            torch._dynamo.reset()
            return torch.compile(model, backend="aot_eager", dynamic=False), lambda: ""
        if self.arguments.through == "placed":
            step, found = compile_placed(model, cached_profile(self.device), ENCODED, lossy)
            return step, lambda: "; ".join(
                f"{key} {size / found[-1].saved_bytes:.0%}" for key, size in found[-1].bytes_by_codec.items()
            )
        return self.public(task, model, lossy)

    def public(self, task: Task, model: nn.Module, lossy: bool | str) -> tuple[Callable[..., Any], Callable[[], str]]:
        """The same through fxhome's own backend: the smallest budget that compression alone can meet."""
        import fxhome
        from fxhome import backend
        from fxhome.passes import codec_choice

        torch._dynamo.reset()
        if isinstance(lossy, str):
            codec_choice.DEFAULT_LOSSY = lossy
        options: dict[str, Any] = {"allow": ("compress",), "lossy": bool(lossy), "inner": "aot_eager"}
        budget: int | str = "1%"
        state = {key: value.clone() for key, value in model.state_dict().items()}
        try:
            torch.compile(model, backend=backend.fxhome, options={**options, "memory_budget": budget})(
                *task.batch(0, 0)
            )
        except fxhome.InfeasibleBudgetError as refused:
            # AdamW's two moments appear after the first step and are resident from then on.
            moments = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
            budget = (refused.minimum_bytes or 0) + moments + (1 << 18)
        model.load_state_dict(state)
        torch._dynamo.reset()
        step = torch.compile(model, backend=backend.fxhome, options={**options, "memory_budget": budget}, dynamic=False)
        return step, lambda: str({k.value: v for k, v in fxhome.plans()[-1].bytes_by_placement().items() if v})


def trained_variant(
    arguments: argparse.Namespace, task: str, variant: str
) -> tuple[list[dict[str, float]], str, float]:
    """(results by seed, what was encoded, seconds) of one variant of one task; runs in a process of its own."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, arguments.jobs)))
    begin = time.perf_counter()
    quality = Quality(arguments, _say_nothing)
    results, encoded = quality.train(TASKS[task](quality.device, quality.small), variant)
    return results, encoded, time.perf_counter() - begin


def _say_nothing(*_: Any, **__: Any) -> None:
    """What a worker has to say it returns."""


def main() -> None:
    """Parse the command line, measure, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swap-latency", action="store_true")
    parser.add_argument("--host-cost", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no network after so long")
    parser.add_argument("--jobs", type=int, default=1, help="variants trained at the same time")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument(
        "--compressed", nargs="*", default=list(COMPRESSED), choices=COMPRESSED, help="for swap latency"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=160, help="image side")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="training steps (default: by task; 200 for --swap-latency)")
    parser.add_argument("--through", choices=("placed", "public"), default="placed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rows: list[dict[str, Any]] = []
    name = f"codec_training_{arguments.through}"
    if arguments.swap_latency or arguments.host_cost:
        name = "codec_swap_latency" if arguments.swap_latency else "codec_host_cost"

    def say(section: str, case: str, **values: Any) -> None:
        row: dict[str, Any] = {"section": section, "case": case}
        row |= {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}
        rows.append(row)
        print("  " + "  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        write(arguments.out, f"{name}_{arguments.device.split(':')[0]}", rows)

    if arguments.swap_latency:
        swap_latency(
            tuple(arguments.networks), arguments.batch, arguments.size, arguments.steps or 200, arguments.repeats,
            arguments.seconds, say, tuple(arguments.compressed),
        )  # fmt: skip
    elif arguments.host_cost:
        for network in arguments.networks:
            host_cost_of_a_step(network, arguments.batch, arguments.size, say)
    else:
        Quality(arguments, say).run()


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Everything measured so far, as JSON and as Markdown."""
    facts = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python -m benchmarks.codec_training " + " ".join(sys.argv[1:]),
    }
    lines = ["# Compressed activations in training", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    for section in dict.fromkeys(row["section"] for row in rows):
        mine = [row for row in rows if row["section"] == section]
        columns = list(dict.fromkeys(key for row in mine for key in row if key != "section"))
        lines += [f"## {section}", "", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in mine]
        lines.append("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    (folder / f"{name}.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
