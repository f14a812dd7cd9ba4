"""What tracing records wrongly is put right: types, and bytes of storages, as the kernels make them."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from fxhome.passes.recorded_values import correct_recorded_values
from tests.graph_tools import joint_graph


@pytest.mark.parametrize("dynamic", [False, True])
def test_recorded_types_and_bytes_are_put_right(dynamic: bool) -> None:
    scale = torch.ones(16)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.group_norm((x @ weight).bfloat16(), 4, scale)
        return torch.nn.functional.mse_loss(y, y)

    weight = torch.randn(32, 16, requires_grad=True)
    module, _ = joint_graph(normed, torch.randn(8, 32), weight, dynamic=dynamic)
    correct_recorded_values(module, runs_as_traced=True)
    nodes = {str(node.target): node for node in module.graph.nodes}
    norm, loss = nodes["aten.native_group_norm.default"], nodes["aten.mse_loss.default"]
    assert [value.dtype for value in norm.meta["val"]] == [torch.bfloat16, torch.float32, torch.float32]
    assert loss.meta["val"].untyped_storage().nbytes() == 8 * 16 * 2
    for item in norm.users:
        value = item.meta["val"]
        for view in [user for user in item.users if user.target is torch.ops.aten.detach.default]:
            assert view.meta["val"].dtype == value.dtype
            assert view.meta["val"].untyped_storage()._cdata == value.untyped_storage()._cdata


class Sizes(fx.Interpreter):
    """Runs a graph on real tensors and notes where a storage has other bytes than were recorded."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.wrong: dict[str, tuple[int, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and n.op == "call_function":
            real, recorded = (int(value.untyped_storage().nbytes()) for value in (result, n.meta["val"]))
            if real != recorded:
                self.wrong[n.name] = (real, recorded)
        return result


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_written_into_a_part_of_a_tensor_takes_the_whole_tensors_bytes(dynamic: bool) -> None:
    """Rows written in a loop, as recurrent models do: each copy into a row is a clone of all rows."""

    def written(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(3, *x.shape)
        for i in range(3):
            x = x @ weight
            rows[i, :, ::2] = x[:, ::2]
        return rows.square().sum()

    inputs = torch.randn(8, 32), torch.randn(32, 32, requires_grad=True)
    module, _ = joint_graph(written, *inputs, dynamic=dynamic)
    recorded = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    real = [
        int(value) if isinstance(value, torch.SymInt) else torch.ones(list(map(int, value.shape))) for value in recorded
    ]

    def wrong() -> dict[str, tuple[int, int]]:
        sizes = Sizes(module)
        with torch.no_grad():
            sizes.run(*real)
        return sizes.wrong

    assert (3 * 8 * 32 * 4, 8 * 32 * 4) in wrong().values(), "torch records them right by now"
    correct_recorded_values(module, runs_as_traced=False)
    assert wrong()
    correct_recorded_values(module, runs_as_traced=True)
    assert wrong() == {}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_an_embedding_bags_indices_have_an_element_that_nothing_fills(mode: str, last: bool) -> None:
    def bag(indices: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        kwargs: Any = {"mode": mode, "include_last_offset": last}
        return torch.nn.functional.embedding_bag(indices, weight, offsets, **kwargs).sum()

    weight = torch.randn(10, 8, requires_grad=True)
    real = torch.randint(0, 10, (12,)), weight.detach(), torch.arange(0, 13, 4), torch.ones(())
    module, _ = joint_graph(bag, real[0], weight, real[2])
    by_shape = {tuple(value.shape): value for value in real}
    inputs = module.graph.find_nodes(op="placeholder")
    correct_recorded_values(module, runs_as_traced=True)
    sizes = Sizes(module)
    with torch.no_grad():
        sizes.run(*(by_shape[tuple(node.meta["val"].shape)] for node in inputs))

    assert sizes.wrong == {}


def test_a_folded_image_has_the_bytes_of_its_columns() -> None:
    def unfolded(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        columns = torch.nn.functional.unfold(image * weight, 3)
        return torch.nn.functional.fold(columns.sin(), (8, 8), 3).cos().sum()

    weight = torch.randn(1, 4, 8, 8, requires_grad=True)
    image = torch.randn(2, 4, 8, 8)
    module, _ = joint_graph(unfolded, image, weight)
    by_shape = {tuple(value.shape): value for value in (image, weight.detach(), torch.ones(()))}
    inputs = module.graph.find_nodes(op="placeholder")
    correct_recorded_values(module, runs_as_traced=True)
    sizes = Sizes(module)
    with torch.no_grad():
        sizes.run(*(by_shape[tuple(node.meta["val"].shape)] for node in inputs))

    assert sum(node.target is torch.ops.aten.col2im.default for node in module.graph.nodes) == 2
    assert sizes.wrong == {}


class Scaled(torch.nn.Module):
    """A product with a number, viewed by what follows; where sizes are dynamic, so is the number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        table = x.cos() * self.scale
        y = weight
        for _ in range(3):
            first, second = table.chunk(2)
            y = (y * table.unsqueeze(0)).sin() * torch.cat((second, first))
        return y.sum()


def test_views_of_what_took_anothers_place_are_recorded_in_its_storage() -> None:
    """Where a number is a symbol, torch puts products with a tensor in place of those with the number."""
    weight = torch.randn(3, 16, 8, requires_grad=True)
    module, _ = joint_graph(Scaled(), torch.randn(16, 8), weight, dynamic=True)

    def astray() -> list[str]:
        found = []
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
                (source,) = node.all_input_nodes[:1]
                results = node.meta["val"]
                first = results if isinstance(results, torch.Tensor) else results[0]
                if first.untyped_storage()._cdata != source.meta["val"].untyped_storage()._cdata:
                    found.append(node.name)
        return found

    def parts() -> list[bool]:
        items = [node for node in module.graph.nodes if node.target is operator.getitem]
        return [node.meta["val"] is node.args[0].meta["val"][node.args[1]] for node in items]

    assert astray(), "torch records them right by now"
    correct_recorded_values(module, runs_as_traced=True)
    assert astray() == []
    assert all(parts())
