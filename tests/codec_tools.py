"""Run a model under placements that a test chooses, with nothing of the search, and measure what really happens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from fxhome.device import DeviceProfile
from fxhome.passes.baseline import copy_joint
from fxhome.passes.capture import normalize
from fxhome.passes.codec_choice import StorageCodecs, choose_codecs
from fxhome.passes.cost_model import node_costs
from fxhome.passes.facts import GraphFacts, extract_facts
from fxhome.passes.graph_peak import graph_peak
from fxhome.passes.insert_codecs import insert_codecs
from fxhome.passes.insert_transfers import insert_transfers
from fxhome.passes.partition import partition
from fxhome.passes.problem import build_problem
from fxhome.passes.schedule import schedule
from fxhome.passes.simulate import Link, Placements, Problem, SimResult, simulate
from fxhome.passes.torch_compat import boxed_callable
from fxhome.passes.verify import verify_boundary, verify_codecs, verify_partition, verify_transfers
from fxhome.placement import Instruction
from fxhome.runtime.meter import StorageMeter

LINK = Link(d2h_us_per_byte=1 / 5e3, h2d_us_per_byte=1 / 5e3, duplex_slowdown=1.1, latency_us=2.0)
PROFILE = DeviceProfile(
    name="test",
    kind="cpu",
    d2h_bytes_per_s=5e9,
    h2d_bytes_per_s=5e9,
    duplex_bytes_per_s=8e9,
    copy_latency_us=2.0,
    memory_bytes_per_s=1e10,
    launch_us=5.0,
    flops_per_s=(("float32", 5e10),),
    total_memory_bytes=1 << 34,
    host_memory_bytes=1 << 34,
    versions=(("torch", torch.__version__),),
)
Choose = Callable[[GraphFacts, Problem], Placements]
Offer = Callable[[GraphFacts, tuple[StorageCodecs, ...]], tuple[StorageCodecs, ...]]


@dataclass
class Run:
    """What one run decided and left behind."""

    facts: GraphFacts
    problem: Problem
    placement: Placements
    result: SimResult
    program: tuple[Instruction, ...]
    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    written_peak_bytes: int
    measured_peak_bytes: int = 0
    loss: torch.Tensor | None = None
    gradients: tuple[torch.Tensor, ...] = ()


def compile_with(
    model: nn.Module,
    choose: Choose,
    *,
    lossy: bool | str = False,
    budget: int = 0,
    offer: Offer | None = None,
    allow: Collection[str] = ("swap", "recompute", "compress"),
) -> tuple[Callable[..., Any], list[Run]]:
    """Compile `model` under the placements that `choose` returns. `offer` may change what the codecs are."""
    runs: list[Run] = []

    def split(joint: torch.fx.GraphModule, _: object, *, num_fwd_outputs: int, **__: Any) -> Any:
        work = normalize(copy_joint(joint))
        facts = extract_facts(work, num_fwd_outputs)
        costs = node_costs(work, facts, PROFILE, measure=False)
        codecs = choose_codecs(work, facts, PROFILE, allow, lossy=lossy)
        if offer is not None:
            codecs = offer(facts, codecs)
        problem = build_problem(facts, costs, LINK, allow, codecs=codecs)
        placement = choose(facts, problem)
        result = simulate(problem, placement, budget)
        program = schedule(facts, placement, result)
        names = {facts.storages[s].name: problem.codec_of(s, int(code)) for s, code in enumerate(placement)}
        used = {name: codec for name, codec in names.items() if codec is not None}
        graphs = partition(work, program, num_fwd_outputs)
        verify_partition(work, *graphs, program, num_fwd_outputs)
        graphs = insert_codecs(*graphs, program, num_fwd_outputs, used, facts.fingerprint)
        verify_codecs(*graphs)
        graphs = insert_transfers(*graphs, program, num_fwd_outputs, used)
        verify_boundary(*graphs, num_fwd_outputs)
        verify_transfers(*graphs)
        written = graph_peak(*graphs, num_fwd_outputs, facts.device_type, facts.planned_for, {})
        runs.append(Run(facts, problem, placement, result, program, *graphs, written.peak_bytes))
        return graphs

    def run_as_is(module: torch.fx.GraphModule, _: Any) -> Any:
        return boxed_callable(module)

    compiler = aot_autograd(fw_compiler=run_as_is, bw_compiler=run_as_is, partition_fn=split)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        with torch._functorch.config.patch(donated_buffer=False):
            return compiler(gm, inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=backend), runs


def run_step(
    model: nn.Module,
    x: torch.Tensor,
    choose: Choose,
    *,
    lossy: bool | str = False,
    budget: int = 0,
    offer: Offer | None = None,
    allow: Collection[str] = ("swap", "recompute", "compress"),
    seed: int = 0,
) -> Run:
    """One compiled step from random state `seed`, after a warm-up, metered from outside."""
    model.zero_grad(set_to_none=True)
    compiled, runs = compile_with(model, choose, lossy=lossy, budget=budget, offer=offer, allow=allow)
    compiled(x).backward()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    gc.collect()
    with StorageMeter(granule_bytes=1) as meter:
        meter.track_resident()
        start = meter.current_bytes
        loss = compiled(x)
        loss.backward()
    run = runs[-1]
    run.measured_peak_bytes = meter.peak_bytes - start
    run.loss = loss.detach()
    run.gradients = tuple(p.grad.clone() for p in model.parameters() if p.grad is not None)
    return run


def stock_step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The same step under the stock backend."""
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    loss = torch.compile(model, backend="aot_eager")(x)
    loss.backward()
    gradients = tuple(p.grad.clone() for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def place(code: int, only: str | None = None) -> Choose:
    """Put everything that may be under `code` (or only what `only`'s codec would handle)."""

    def choose(_: GraphFacts, problem: Problem) -> Placements:
        placement = problem.keep_all()
        for s in np.flatnonzero(problem.allowed[:, code]):
            if only is None or problem.codec_of(int(s), code) == only:
                placement[s] = code
        return placement

    return choose
