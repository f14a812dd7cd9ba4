"""A joint graph in numbers: its facts, its costs, and the problem that the search solves.

module -> facts -> cost (host and codecs included) -> GraphModel
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from torch.fx.graph_module import GraphModule

from fxhome.device import DeviceProfile
from fxhome.host_costs import HostCosts
from fxhome.options import Options
from fxhome.passes.codec_choice import NO_CODEC, choose_codecs
from fxhome.passes.cost_model import node_costs
from fxhome.passes.facts import GraphFacts, extract_facts
from fxhome.passes.host_times import host_times
from fxhome.passes.problem import Costs, build_problem
from fxhome.passes.runner import Runner
from fxhome.passes.simulate import Link, Problem
from fxhome.passes.situation import Situation


@dataclass(frozen=True, eq=False)
class GraphModel:
    """A graph as the search sees it. Bytes on the device of the graph."""

    module: GraphModule
    facts: GraphFacts
    costs: Costs
    problem: Problem
    alone: Problem
    """The problem with nothing asked for between the forward and the backward."""
    asking: Callable[[int], Problem]
    """The problem with so many bytes asked for in between."""

    @property
    def workspace_by_node(self) -> dict[str, int]:
        """Device bytes that an operator takes besides its results, by node; those that take none are left out."""
        sizes = zip(self.facts.node_names, self.costs.workspace_bytes, strict=True)
        return {name: size for name, size in sizes if size}

    @property
    def most_workspace_bytes(self) -> int:
        """What the operator that takes most takes besides its results."""
        return max(self.costs.workspace_bytes, default=0)


@dataclass(frozen=True, eq=False)
class Modeler:
    """Models graphs of one step, in one situation, on one device."""

    runner: Runner
    num_fwd_outputs: int
    options: Options
    profile: DeviceProfile
    situation: Situation
    measure: bool
    """Whether operators are run where their times are not known."""
    fusing: bool
    saved: frozenset[object]
    """Keys of the storages that the inner compiler's own partition saves for the backward, and so writes."""
    observed: Mapping[str, int]
    """Encoded bytes seen at run time by storage name."""
    host_costs: HostCosts | None
    off_host: Collection[str]
    """Names of storages that are not moved to the host."""

    def model(self, module: GraphModule, fingerprint: str | None = None) -> GraphModel:
        """The model of a normalized joint graph. fingerprint: whose it goes by, where that is another graph's."""
        profile, options, situation = self.profile, self.options, self.situation
        facts = self.runner.run(
            "facts",
            lambda: extract_facts(module, self.num_fwd_outputs, profile.kind, fusing=self.fusing, saved=self.saved),
        )
        costs = self.runner.run(
            "cost", lambda: node_costs(module, facts, profile, measure=self.measure, fusing=self.fusing)
        )
        host = host_times(module, facts, self.host_costs, costs.host_us) if self.host_costs is not None else None
        offers = choose_codecs(module, facts, profile, options.allow, lossy=options.lossy, observed=self.observed)
        if fingerprint is not None:
            facts = replace(facts, fingerprint=fingerprint)

        def asking(between_bytes: int) -> Problem:
            return build_problem(
                facts,
                costs,
                link_of(profile),
                options.allow,
                codecs=[
                    NO_CODEC if storage.name in situation.fixed_layouts else offer
                    for storage, offer in zip(facts.storages, offers, strict=True)
                ],
                outside_bytes=situation.outside_bytes,
                between_bytes=between_bytes,
                off_host={*self.off_host, *situation.fixed_layouts},
                host=host,
            )

        # The backward's tangents are not there yet in between.
        tangent_bytes = sum(facts.storages[s].size_bytes for s in facts.tangent_storages)
        between_bytes = max(0, situation.between_bytes - tangent_bytes)
        problem = asking(between_bytes)
        return GraphModel(module, facts, costs, problem, asking(0) if between_bytes else problem, asking)


def link_of(profile: DeviceProfile) -> Link:
    """The copy engines of a device as the simulator wants them."""
    alone = profile.d2h_bytes_per_s + profile.h2d_bytes_per_s
    return Link(
        d2h_us_per_byte=1e6 / profile.d2h_bytes_per_s,
        h2d_us_per_byte=1e6 / profile.h2d_bytes_per_s,
        duplex_slowdown=max(1.0, alone / profile.duplex_bytes_per_s),
        latency_us=profile.copy_latency_us,
        compute_slowdown=profile.copy_slowdown,
    )
