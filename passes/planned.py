"""What planning one joint graph gives: the plan, the two graphs that carry it out, and what is asked of them later."""

from dataclasses import dataclass, field, replace

from torch.fx.graph_module import GraphModule

from fxhome.errors import InfeasibleBudgetError
from fxhome.passes.channels_last import Layouts
from fxhome.passes.facts import GraphFacts
from fxhome.passes.host_calibration import HostedPlan
from fxhome.passes.search import minimum_peak
from fxhome.passes.simulate import Problem
from fxhome.placement import Plan
from fxhome.units import format_bytes


@dataclass(eq=False)
class Planned:
    """A plan and the two graphs that carry it out."""

    plan: Plan
    forward: GraphModule
    backward: GraphModule
    facts: GraphFacts
    is_baseline: bool
    boundary_bytes: int
    """Graph storages alive between forward and backward, tangents not counted."""
    forward_bytes: int
    """The worst moment of the forward alone, above what is resident."""
    is_best_effort: bool = False
    """The budget could not be met and the user asked to go on (on_infeasible="best_effort")."""
    kept_free_bytes: int = 0
    """How much more than its peak the budget must hold, for graphs that run between its forward and its backward."""
    output_bytes: int = 0
    """Outputs of the forward, which the caller holds during the backward, whether they are saved for it or not."""
    held_inputs: frozenset[str] = frozenset()
    """Inputs of the backward that live in these outputs."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """How long each planning step took."""

    workspace_by_node: dict[str, int] = field(default_factory=dict)
    """Device bytes that an operator takes besides its results, by joint graph node."""

    stock_boundary_bytes: int = 0
    """What the baseline would save for the backward."""
    problem: Problem | None = None
    """The graph's own problem, with nothing asked for between its forward and its backward."""
    storage_class: tuple[str, ...] = ()
    """The class of the operator behind each storage of `facts`."""
    layouts: Layouts = Layouts.TRACED
    """What was done to the convolutions of the graph before it was planned: `rewrite` does it again."""
    hosted: HostedPlan | None = None
    """The plan as it was simulated, where it has a host to wait for."""

    @property
    def unsaved_bytes(self) -> int:
        """How much less it saves for the backward than the baseline would."""
        return max(0, self.stock_boundary_bytes - self.boundary_bytes)

    def smallest_peak_bytes(self) -> int:
        """The least graph bytes that a plan of this graph can do with."""
        assert self.problem is not None
        return minimum_peak(self.problem)[0]

    def checked(self, predicted_bytes: int) -> Plan:
        """The plan with the peak that the compiler's own buffers give in place of the model's."""
        return replace(self.plan, predicted_peak_bytes=predicted_bytes)

    def refuse(self, predicted_bytes: int) -> InfeasibleBudgetError:
        """The refusal after the compiler's buffers did not fit however often it was planned again."""
        return InfeasibleBudgetError(
            f"memory_budget={format_bytes(self.plan.budget_bytes)} ({self.plan.budget_bytes} bytes): every plan "
            "that fits by "
            f"the model needs more once lowered; the last one needs {predicted_bytes} bytes "
            f"({format_bytes(predicted_bytes)}). "
            f"Ask for at least {predicted_bytes}, or use a smaller batch",
            minimum_bytes=predicted_bytes,
            budget_bytes=self.plan.budget_bytes,
        )

    @property
    def tangent_bytes(self) -> int:
        """Bytes of the gradients that the backward is given."""
        return sum(self.facts.storages[s].size_bytes for s in self.facts.tangent_storages)
