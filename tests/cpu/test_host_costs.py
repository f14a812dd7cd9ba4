"""What real steps have told of the host: one factor, whose figures are kept and joined."""

from __future__ import annotations

import json

import pytest

from fxhome.host_costs import CLEARLY_LESS, MAX_GRAPHS, MOST_TIMES, HostCosts, TimedGraph, merge_hosts
from fxhome.json_codec import decode, encode
from tests.host_tools import host_costs


def timed(graph: str, taken_us: float, alone_us: float = 1000.0) -> TimedGraph:
    return TimedGraph(graph, taken_us, alone_us)


def test_without_steps_launches_take_what_the_probe_says() -> None:
    assert host_costs().launch_factor == 1.0


def test_the_factor_is_that_of_all_launches_that_were_timed() -> None:
    assert host_costs(timed("a", 1500.0)).launch_factor == 1.5
    assert host_costs(timed("a", 1500.0), timed("b", 6000.0, 3000.0)).launch_factor == 7500.0 / 4000.0


def test_steps_are_believed_where_the_probe_found_launches_to_take_longer() -> None:
    assert host_costs(timed("a", 700.0)).launch_factor == 0.7


def test_of_one_graph_the_shorter_time_counts_where_it_is_clearly_shorter() -> None:
    """What is not clear changes nothing: another factor may mean another plan, and compiling anew."""
    known = host_costs(timed("a", 2000.0), timed("b", 1000.0))
    slightly = timed("a", 2000.0 * CLEARLY_LESS + 1.0)
    clearly = timed("a", 2000.0 * CLEARLY_LESS - 1.0)
    assert known.with_steps((timed("a", 9000.0),)) is known
    assert known.with_steps((slightly,)) is known
    assert known.with_steps((clearly,)).steps == (timed("b", 1000.0), clearly)


def test_what_cannot_be_launches_is_not_taken_for_them() -> None:
    known = host_costs(timed("a", 2000.0))
    assert known.with_steps((timed("b", 1000.0 * MOST_TIMES + 1.0),)) is known
    assert known.with_steps((timed("b", 1000.0 * MOST_TIMES),)) is not known
    assert known.with_steps((timed("b", 1000.0 / MOST_TIMES - 1.0),)) is known
    assert known.with_steps((timed("b", 1000.0 / MOST_TIMES),)) is not known


def test_the_graphs_timed_last_count() -> None:
    many = host_costs().with_steps(tuple(timed(str(i), 1000.0 + i) for i in range(MAX_GRAPHS + 3)))
    assert len(many.steps) == MAX_GRAPHS
    assert (many.steps[0].graph, many.steps[-1].graph) == ("3", str(MAX_GRAPHS + 2))


def test_what_two_processes_know_is_joined() -> None:
    mine = (host_costs(timed("a", 2000.0)), host_costs(inner="aot_eager"))
    others = (host_costs(timed("a", 1000.0), timed("b", 3000.0)), host_costs(timed("c", 1.0), inner="third"))
    joined = {entry.inner: entry for entry in merge_hosts(mine, others)}
    assert list(joined) == ["inductor", "aot_eager", "third"]
    assert joined["inductor"].steps == (timed("a", 1000.0), timed("b", 3000.0))
    assert joined["aot_eager"].steps == ()
    assert merge_hosts(mine, mine) == mine


def test_it_is_kept_as_json() -> None:
    entry = host_costs(timed("a", 2000.0))
    assert decode(HostCosts, json.loads(json.dumps(encode(entry))), "host") == entry


@pytest.mark.parametrize("us", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(us: float) -> None:
    with pytest.raises(ValueError, match="taken_us should be positive and finite"):
        timed("a", us)
    with pytest.raises(ValueError, match="alone_us should be positive and finite"):
        timed("a", 1.0, us)
