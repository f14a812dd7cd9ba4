"""A host for tests: costs, a step of five launches, and a machine whose clock only work moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from benchmarks.search_problems import GraphBuilder
from fxhome.host_costs import HostCosts, TimedGraph
from fxhome.passes.simulate import Link, Problem
from fxhome.passes.simulate_kernels import (
    BACKWARD,
    ENTER_BACKWARD,
    ENTER_FORWARD,
    FORWARD,
    HOST_FIGURES,
    INPUT,
    LEAVE,
    SWAP_IN,
    SWAP_OUT,
    WAIT,
)

EVERYTHING = 1 << 60
many = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


def host_costs(*steps: TimedGraph, inner: str = "inductor", **figures: float) -> HostCosts:
    """Every figure is 1 us, but for those that are given."""
    names = [field.name for field in dataclasses.fields(HostCosts)][1:-1]
    return HostCosts(inner, **(dict.fromkeys(names, 1.0) | figures), steps=steps)


class Machine:
    """A clock that only work moves, and a device that says what it is told to say."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.idle = True
        self.calls = 0
        self.asked = 0

    def clock(self) -> float:
        self.asked += 1
        return self.now_s

    def is_idle(self) -> bool:
        return self.idle

    def memory_calls(self) -> int:
        return self.calls

    def work(self, us: float) -> Callable[[Any], Any]:
        def call(args: Any) -> Any:
            self.now_s += us / 1e6
            return args

        return call


def two_layers(device_us: float, launch_us: float, **figures: float) -> Problem:
    """Two nodes forward, a loss, a gradient for each: every node takes `device_us`, and `launch_us` of the host."""
    b = GraphBuilder()
    source = b.node(INPUT, [], 0, 0.0)
    first = b.node(FORWARD, [source], 1000, device_us)
    second = b.node(FORWARD, [first], 1000, device_us)
    loss = b.node(FORWARD, [second], 8, device_us, movable=False)
    gradient = b.node(BACKWARD, [loss, second], 1000, device_us)
    last = b.node(BACKWARD, [gradient, first], 1000, device_us)
    problem, _ = b.problem([loss], [last], Link(1e-2, 1e-2, 1.0, 0.0))
    step = np.zeros(HOST_FIGURES)
    names = {
        "enter": ENTER_FORWARD,
        "between": ENTER_BACKWARD,
        "leave": LEAVE,
        "swap_out": SWAP_OUT,
        "swap_in": SWAP_IN,
        "wait": WAIT,
    }
    for name, value in figures.items():
        step[names[name]] = value
    launches = np.where(problem.arrays.node_phase == INPUT, 0.0, launch_us)
    arrays = problem.arrays._replace(node_host_us=launches, host_us=step)
    return dataclasses.replace(problem, arrays=arrays)
