"""The replay of lowered kernels and copies, and the table of plans lowered without a device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.lowering import PROFILES, SLACK, Row, replay, table
from benchmarks.pretend_gpu import derived_times
from fxhome.device import DeviceProfile
from fxhome.passes.cost_model import op_signature
from fxhome.passes.split_convolution import SUFFIX, split_convolutions
from tests.graph_tools import normalized

PROFILE = dataclasses.replace(
    DeviceProfile.load(PROFILES / "h200_device.json"), d2h_bytes_per_s=1e9, h2d_bytes_per_s=2e9, copy_latency_us=10.0
)


def test_copies_hide_behind_kernels_and_a_wait_stalls_for_the_rest() -> None:
    forward = [
        ("kernel", None, 100.0),
        ("swap_out", "x", 190_000),
        ("kernel", None, 150.0),
        ("swap_out_wait", "x", 0.0),
    ]
    backward = [("swap_in", "x_host", 80_000), ("kernel", None, 60.0), ("swap_in_wait", "x_host", 0.0)]
    # Out: 10 + 190 us from 100 on, waited for at 250. In: 10 + 40 us from 300 on, hidden behind 60.
    step_ms, stalls_ms = replay([forward, backward], PROFILE)
    assert step_ms == pytest.approx(0.36)
    assert stalls_ms == pytest.approx(0.05)


def test_copies_of_one_direction_run_one_after_the_other() -> None:
    items = [("swap_out", "x", 90_000), ("swap_out", "y", 90_000), ("swap_out_wait", "y", 0.0)]
    assert replay([items], PROFILE) == pytest.approx((0.2, 0.2))


def test_a_wait_for_what_an_encoder_moved_counts_nothing() -> None:
    assert replay([[("encode", "x", 0.0), ("swap_out_wait", "x", 0.0), ("kernel", None, 5.0)]], PROFILE) == (0.005, 0.0)


def test_the_table_shows_ratios_to_the_same_graphs_without_a_budget_and_names_refusals() -> None:
    rows = {
        f"m:{SLACK}": Row("m", SLACK, 10**12, 4_000_000_000, 4_000_000_000, 1, 100.0, 98.0, 0.0),
        "m:60%": Row("m", "60%", 2_400_000_000, 2_380_000_000, 2_400_000_000, 2, 110.0, 107.8, 1.5),
        "m:5%": Row("m", "5%", tries=3, refused="at least 1.00 GB"),
    }
    text = table(rows).splitlines()
    assert "| m | (slack) | 4.000 | 4.000 | +0.00 % | 1 | 1.000 | 1.000 | 0.0 |" in text
    assert "| m | 2.40 (60%) | 2.380 | 2.400 | -0.83 % | 2 | 1.100 | 1.100 | 1.5 |" in text
    assert "| m | 5% | refused: at least 1.00 GB | | | 3 | | | |" in text


def test_each_half_of_a_convolutions_backward_counts_half_of_what_the_whole_took() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x.sin(), weight).exp().sum()

    values = [torch.randn(1, 2, 8, 8, requires_grad=True), torch.randn(2, 2, 3, 3, requires_grad=True)]
    module, _ = normalized(step, *values)
    (whole,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
    times = {op_signature(whole): (80.0, 4096)}
    split_convolutions(module, min_bytes=0)
    halves = [whole, next(node for node in module.graph.nodes if node.name.endswith(SUFFIX))]
    wanted = {op_signature(node): (node, node.args) for node in halves}
    assert derived_times(wanted, times, PROFILE) == dict.fromkeys(wanted, (40.0, 2048))
    assert derived_times(wanted, {}, PROFILE) == {}


def test_a_convolution_without_its_bias_counts_what_it_took_less_another_pass_over_its_result() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, weight, bias).exp().sum()

    values = [torch.randn(*size, requires_grad=True) for size in ((1, 2, 8, 8), (2, 2, 3, 3), (2,))]
    module, _ = normalized(step, *values)
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    args = (*node.args[:2], None, *node.args[3:])
    wanted = {op_signature(node, args): (node, args)}
    pass_us = 2 * (2 * 6 * 6 * 4) / PROFILE.memory_bytes_per_s * 1e6
    assert derived_times(wanted, {op_signature(node): (80.0, 64)}, PROFILE) == {
        op_signature(node, args): (pytest.approx(80.0 - pass_us), 64)
    }
