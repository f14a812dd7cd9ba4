"""The list of instructions: every transfer at its simulated place, in an order that a rewrite can carry out."""

from __future__ import annotations

import numpy as np
import pytest

from fxhome.passes.facts import GraphFacts
from fxhome.passes.schedule import kept_bytes, schedule
from fxhome.passes.simulate import KEEP, RECOMPUTE, SWAP, Problem, simulate
from tests.graph_tools import EVERYTHING, chain, chain_inputs, normalized, placed, problem_of


@pytest.fixture(scope="module")
def example() -> tuple[GraphFacts, Problem]:
    module, outputs = normalized(chain, *chain_inputs())
    return problem_of(module, outputs)


@pytest.mark.parametrize("budget", [0, 30_000, EVERYTHING])
@pytest.mark.parametrize("code", [KEEP, SWAP, RECOMPUTE])
def test_executed_nodes_are_the_simulated_program(example: tuple[GraphFacts, Problem], code: int, budget: int) -> None:
    facts, problem = example
    placement = placed(problem, code)
    result = simulate(problem, placement, budget)
    program = schedule(facts, placement, result)
    executed = [item for item in program if item.kind in ("op", "recompute")]
    assert [item.target for item in executed] == [facts.node_names[node] for node in result.program]
    assert [item.kind == "recompute" for item in executed] == [bool(flag) for flag in result.recomputed]
    ends = [i for i, item in enumerate(program) if item.kind == "forward_end"]
    assert len(ends) == 1
    before = [item for item in program[: ends[0]] if item.kind in ("op", "recompute")]
    assert len(before) == result.forward_length


@pytest.mark.parametrize("budget", [0, 30_000, EVERYTHING])
def test_each_swap_is_out_waited_in_waited_in_this_order(example: tuple[GraphFacts, Problem], budget: int) -> None:
    facts, problem = example
    placement = placed(problem, SWAP)
    result = simulate(problem, placement, budget)
    program = schedule(facts, placement, result)
    moved = [facts.storages[s].name for s in np.flatnonzero((placement == SWAP) & (result.saved == 1))]
    assert moved
    end = [item.kind for item in program].index("forward_end")
    for name in moved:
        places = {
            item.kind: i for i, item in enumerate(program) if item.target == name and item.kind.startswith("swap")
        }
        assert places["swap_out"] < places["swap_out_wait"] < places["swap_in"] < places["swap_in_wait"]
        assert places["swap_out"] < end < places["swap_in"]
        assert program[places["swap_out"] - 1].kind in ("op", "swap_out")
    kinds = [item.kind for item in program]
    assert all(kinds.count(kind) == len(moved) for kind in ("swap_out", "swap_out_wait", "swap_in", "swap_in_wait"))


@pytest.mark.parametrize("synchronous", [False, True])
def test_waits_and_issues_stand_right_before_their_instruction(
    example: tuple[GraphFacts, Problem], synchronous: bool
) -> None:
    facts, problem = example
    placement = placed(problem, SWAP)
    result = simulate(problem, placement, 30_000, synchronous=synchronous)
    program = schedule(facts, placement, result)
    position, places = 0, {}
    for item in program:
        if item.kind in ("op", "recompute"):
            position += 1
        elif item.target:
            places[item.kind, item.target] = position
    for s in np.flatnonzero((placement == SWAP) & (result.saved == 1)):
        name = facts.storages[s].name
        assert places["swap_out_wait", name] == result.wait_out[s]
        assert places["swap_in", name] == result.issue_in[s]
        assert places["swap_in_wait", name] == result.wait_in[s]
        assert places["swap_out", name] == result.issue_out[s]
        if synchronous:
            # One layer runs between the start of a copy and its wait.
            assert result.issue_out[s] == result.last_forward[s] == result.wait_out[s] - 1
            assert result.wait_in[s] - result.issue_in[s] == 1 or result.issue_in[s] == result.first_backward[s]
        else:
            assert result.wait_in[s] == result.first_backward[s]
            assert result.issue_out[s] == result.produced[s] + 1


def test_kept_bytes_add_up_to_the_saved_set(example: tuple[GraphFacts, Problem]) -> None:
    facts, problem = example
    placement = placed(problem, SWAP)
    result = simulate(problem, placement, EVERYTHING)
    by_code = kept_bytes(facts, placement, result)
    saved = sum(s.size_bytes for s, flag in zip(facts.storages, result.saved, strict=True) if flag)
    assert sum(by_code.values()) == saved
    assert by_code[SWAP] > 0
