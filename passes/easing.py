"""Which graph is planned in place of the traced one on CUDA: that of which the backward reads less, and with the
gradients of which pools gathered.

    traced joint graph + its model  ->  ease_backward  ->  the eased graph's model
                                        again, overlapping pools gathered too, where the budget cannot be met without
"""

from dataclasses import replace
from functools import partial

from torch.fx.graph_module import GraphModule

from fxhome.options import Options
from fxhome.passes.baseline import copy_joint, take_saved_early
from fxhome.passes.ease_backward import MIN_BYTES, ease_backward, is_eased, is_eased_for_fusion
from fxhome.passes.facts import GraphFacts
from fxhome.passes.graph_model import GraphModel, Modeler
from fxhome.passes.pool_gradients import gathers_overlapping, scattered_pools
from fxhome.passes.search import minimum_peak
from fxhome.passes.situation import Situation
from fxhome.placement import Plan


def is_to_be_eased(facts: GraphFacts, options: Options, replay: Plan | None) -> bool:
    """Whether what is planned is the graph of which the backward reads less.

    Published policies are run on the graph that they know.
    """
    if facts.planned_for != "cuda":
        return False
    if replay is None:
        return options.policy == "pso"
    known = {storage.name for storage in facts.storages if storage.is_activation}
    return is_eased(replay.program) or any(entry.name not in known for entry in replay.placements)


def eased(traced: GraphModule, plain: GraphModel, modeler: Modeler, replay: Plan | None, room_bytes: int) -> GraphModel:
    """The model of the eased graph; its fingerprint stays that of the plain one. `traced` is not changed.

    room_bytes: what the graph may hold above what is resident.
    """
    names = [node.name for node in plain.module.graph.nodes]
    for_fusion = modeler.fusing and (replay is None or is_eased_for_fusion(replay.program))
    found = plain
    for overlapping in _window_choices(modeler.situation, replay):
        module = modeler.runner.run(
            "ease_backward", partial(ease_backward, copy_joint(traced), fusing=for_fusion, overlapping=overlapping)
        )
        take_saved_early(module, modeler.saved)
        if [node.name for node in module.graph.nodes] == names:
            found = replace(found, module=module)
        else:
            found = modeler.model(module, plain.facts.fingerprint)
        if not scattered_pools(module.graph, MIN_BYTES):
            break
        if minimum_peak(found.problem, modeler.options.seed)[0] <= room_bytes:
            break
    return found


def _window_choices(situation: Situation, replay: Plan | None) -> tuple[bool, ...]:
    """Whether the gradients of overlapping pools are gathered: what to try, until a plan fits."""
    if replay is not None:
        return (gathers_overlapping(replay.program),)
    return (True,) if situation.smallest or situation.leave_room else (False, True)
