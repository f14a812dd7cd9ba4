"""Kernels that only share an input come apart, and compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import custom_graph_pass
from torch._inductor.scheduler import FusedSchedulerNode

from fxhome.passes.fit_peak import fit
from fxhome.passes.lowered_buffers import LoweredBuffers
from fxhome.passes.transfer_order import respect_dependencies, unpackers
from fxhome.passes.unfuse import come_apart, independent_parts, ways

_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)


class Apart(_Pass):  # type: ignore[misc]
    """Takes every kernel apart that can be."""

    def __init__(self) -> None:
        self.kernels: list[int] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.kernels.append(len(nodes))
        while True:
            splittable = [i for i, node in enumerate(nodes) if len(independent_parts(node)) > 1]
            if not splittable:
                break
            split = come_apart(nodes, splittable[0])
            assert split is not None
            nodes = respect_dependencies(split, split, unpackers(split))
        self.kernels.append(len(nodes))
        return nodes

    def uuid(self) -> Any:
        return None


def compiled_apart(function: Any, *args: torch.Tensor) -> tuple[Any, list[int]]:
    apart = Apart()
    torch._dynamo.reset()
    with torch._inductor.config.patch(_post_fusion_custom_pass=apart, fx_graph_cache=False):
        found = torch.compile(function, dynamic=False)(*args)
    return found, apart.kernels


def test_loops_that_share_an_input_come_apart_and_compute_the_same() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g = x @ w
        return torch.nn.functional.gelu(x) @ w, (torch.sin(x) * g) @ w

    x, w = torch.randn(64, 64), torch.randn(64, 64)

    found, (before, after) = compiled_apart(function, x, w)

    assert after > before
    torch.testing.assert_close(found, function(x, w))


def test_loops_between_which_something_flows_stay_together() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.exp(x)
        return y, torch.sin(y) + 1

    x = torch.randn(64, 64)

    found, (before, after) = compiled_apart(function, x)

    assert after == before
    torch.testing.assert_close(found, function(x))


class Fitted(_Pass):  # type: ignore[misc]
    """Asks for less than the order that Inductor chose needs."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.orders: list[list[str]] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        buffers = LoweredBuffers(nodes, {})
        before = buffers.peak(nodes)
        fitted, counted = fit(nodes, buffers, before.peak_bytes - 1)
        self.peaks = [before.peak_bytes, counted.peak(fitted).peak_bytes]
        self.orders = [[str(node.get_name()) for node in order] for order in (nodes, fitted)]
        return fitted

    def uuid(self) -> Any:
        return None


def fitted(function: Any, *args: torch.Tensor) -> tuple[Any, Fitted]:
    check = Fitted()
    torch._dynamo.reset()
    with torch._inductor.config.patch(_post_fusion_custom_pass=check, fx_graph_cache=False):
        found = torch.compile(function, dynamic=False)(*args)
    return found, check


def test_what_is_read_only_behind_the_worst_moment_is_made_behind_it() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        now, later = torch.sin(x), torch.cos(x).double()
        small = (now @ w) @ w.t()
        return later @ small.double()

    x, w = torch.randn(64, 64), torch.randn(64, 512)

    found, check = fitted(function, x, w)

    before, after = check.peaks
    assert after < before
    assert len(check.orders[1]) >= len(check.orders[0])
    torch.testing.assert_close(found, function(x, w), rtol=1e-3, atol=1e-2)


def test_a_kernel_that_is_fused_with_an_earlier_one_waits_for_its_last_loop() -> None:
    """The sum over branches is fused with what its first term is made of: left there, all branches come first, and what
    else reads their large results comes later.
    """

    def function(x: torch.Tensor, y: torch.Tensor, wide: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total, others = y.sum(2), []
        terms = []
        for _ in range(3):
            branch = x @ wide
            others.append(branch @ ends)
            terms.append(torch.sin(branch @ wide.t()))
            x = x + 1
        return total + terms[0] + terms[1] + terms[2], *others

    inputs = torch.randn(64, 64), torch.randn(64, 64, 64), torch.randn(64, 1024) / 32, torch.randn(1024, 1) / 32
    large_bytes = 64 * 1024 * 4

    # For inference, Inductor has what is only returned made last.
    with torch._inductor.config.patch(reorder_for_locality=False):
        found, check = fitted(function, *inputs)

    before, after = check.peaks
    assert before > 3 * large_bytes
    assert after < 2 * large_bytes
    assert sorted(check.orders[0]) == sorted(check.orders[1])
    torch.testing.assert_close(found, function(*inputs), rtol=1e-3, atol=1e-3)


def test_a_fit_that_holding_back_does_not_help_leaves_the_kernels_as_they_were() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) @ w

    x, w = torch.randn(64, 64), torch.randn(64, 64)

    found, check = fitted(function, x, w)

    assert check.peaks[0] == check.peaks[1]
    assert check.orders[0] == check.orders[1]
    torch.testing.assert_close(found, function(x, w))


def test_an_order_that_is_not_taken_leaves_the_scheduler_as_it_was() -> None:
    class Asks(_Pass):  # type: ignore[misc]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            known = dict(nodes[0].scheduler.name_to_fused_node)
            sizes = {buffer.get_name(): 1 for node in nodes for buffer in node.get_outputs()}
            self.gains = []
            for worst in range(len(nodes)):
                tried = ways(nodes, worst, sizes)
                self.gains.append([way.gain_bytes for way in tried])
                for way in tried:
                    assert way.order() != nodes
                    way.undo()
            self.unchanged = nodes[0].scheduler.name_to_fused_node == known
            return nodes

        def uuid(self) -> Any:
            return None

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = torch.sin(x), torch.exp(x)
        return ((a @ w) @ w) + b @ w

    asks = Asks()
    torch._dynamo.reset()
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    with torch._inductor.config.patch(_post_fusion_custom_pass=asks, fx_graph_cache=False):
        torch.compile(function, dynamic=False)(x, w)

    assert any(asks.gains)
    assert all(gains == sorted(gains, reverse=True) for gains in asks.gains)
    assert asks.unchanged


@pytest.mark.parametrize("node", [object()])
def test_what_is_no_fused_kernel_is_one_part(node: object) -> None:
    assert independent_parts(node) == [[node]]


class Least(Fitted):
    """Asks for nothing at all, and takes what comes of it."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        buffers = LoweredBuffers(nodes, {})
        fitted, counted = fit(nodes, buffers, 0)
        self.peaks = [buffers.peak(nodes).peak_bytes, counted.peak(fitted).peak_bytes]
        return fitted


class LeastOnAGpu(Least):
    """Fits to nothing what would be one plain kernel on a GPU; the order that the CPU generates is left as it was."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        plain = [
            FusedSchedulerNode(node.scheduler, list(node.get_nodes())) if len(node.get_nodes()) > 1 else node
            for node in nodes
        ]
        known = dict(nodes[0].scheduler.name_to_fused_node)
        nodes[0].scheduler.name_to_fused_node.update({n.get_name(): node for node in plain for n in node.get_nodes()})
        super().__call__(plain)
        nodes[0].scheduler.name_to_fused_node.update(known)
        return nodes


@pytest.mark.parametrize("is_read_again", [False, True], ids=["sums", "sums that their own kernel reads"])
def test_sums_of_what_comes_one_after_the_other_are_taken_as_it_comes(is_read_again: bool) -> None:
    """Each large product is read by the next one and by a sum; Inductor takes all sums in one kernel at the end, which
    then reads the weights once. What one loop of it reads of another is not among what the kernel reads.
    """

    def function(x: torch.Tensor, w: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for _ in range(5):
            large = x @ w
            total = (large * weights).sum(1)
            found.append(torch.tanh(total) / total if is_read_again else total)
            x = large @ w.t() / 32
        return found

    x, w, weights = torch.randn(512, 16), torch.randn(16, 1024) / 4, torch.randn(512, 1024)
    fitted = LeastOnAGpu() if is_read_again else Least()
    torch._dynamo.reset()
    with torch._inductor.config.patch(_post_fusion_custom_pass=fitted, fx_graph_cache=False), torch.no_grad():
        found = torch.compile(function, dynamic=False)(x, w, weights)
    large_bytes = 512 * 1024 * 4
    assert fitted.peaks[0] > 5 * large_bytes
    assert fitted.peaks[1] < 2 * large_bytes
    torch.testing.assert_close(found, function(x, w, weights), rtol=1e-4, atol=1e-3)


class AsksLate(_Pass):  # type: ignore[misc]
    """What may be tried at the last product, in an order in which everything is made just before it is read."""

    gain_bytes = 0

    def __call__(self, nodes: list[Any]) -> list[Any]:
        order = list(nodes)
        for node in reversed(nodes):
            made = {buffer.get_name() for buffer in node.get_outputs()}
            readers = [other for other in order if made & {dep.name for dep in other.unmet_dependencies}]
            if readers:
                order.remove(node)
                order.insert(order.index(readers[0]), node)
        sizes = {buffer.name: buffer.size_bytes for buffer in LoweredBuffers(order, {}).buffers}
        worst = max(i for i, node in enumerate(order) if node.is_extern())
        for way in ways(order, worst, sizes):
            self.gain_bytes = max(self.gain_bytes, way.gain_bytes)
            tried = way.order()
            assert len(respect_dependencies(tried, tried, unpackers(tried))) == len(order) + 1
            way.undo()
        return nodes

    def uuid(self) -> Any:
        return None


def test_small_results_that_sums_need_are_made_before_them() -> None:
    """Each sum is weighted by a vector that is made behind all products: the sums need not wait for that."""

    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        products = []
        for _ in range(5):
            products.append(x @ w)
            x = products[-1] @ w.t() / 32
        weights = torch.softmax(v, 0)
        return [(product * weights).sum(1) for product in products]

    x, w, v = torch.randn(512, 16), torch.randn(16, 1024) / 4, torch.randn(1024)
    asked = AsksLate()
    torch._dynamo.reset()
    with torch._inductor.config.patch(_post_fusion_custom_pass=asked, fx_graph_cache=False), torch.no_grad():
        torch.compile(function, dynamic=False)(x, w, v)
    large_bytes = 512 * 1024 * 4
    assert asked.gain_bytes > 3 * large_bytes
