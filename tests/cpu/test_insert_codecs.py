"""Compressed placements, carried out: bitwise equal where lossless, and the peak predicted to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxhome.errors import GraphRuleError, PlanMismatchError
from fxhome.passes.facts import GraphFacts
from fxhome.passes.insert_codecs import insert_codecs
from fxhome.passes.simulate import COMPRESS, COMPRESS_SWAP, KEEP, SWAP, Placements, Problem, holders
from fxhome.passes.verify import verify_codecs
from fxhome.placement import Instruction
from fxhome.runtime import codec_ops, ops
from fxhome.runtime.stand_in import CopyTiming, cpu_stand_in
from tests.codec_tools import Choose, Run, place, run_step, stock_step


class Net(nn.Module):
    """Convolutions with what the codecs are for: rectified values, pooling indices, a dropout mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16, track_running_stats=False)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 8 * 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        x = nn.functional.dropout(torch.relu(self.second(x)), 0.3)
        x = torch.max_pool2d(x, 2)
        return torch.nn.functional.gelu(self.head(x.flatten(1))).square().mean()


Case = tuple[nn.Module, torch.Tensor, tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


@pytest.fixture(scope="module")
def case() -> Case:
    """A model, its input, and loss and gradients of the stock backend."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 3, 32, 32)
    torch.manual_seed(1)
    return model, x, stock_step(model, x)


def run(case: Case, choose: Choose, timing: CopyTiming = "latest", **options: Any) -> Run:
    """One poisoned step from the random state of the stock one."""
    with cpu_stand_in(copy_timing=timing, poison=True):
        return run_step(case[0], case[1], choose, seed=1, **options)


def same(found: Run, case: Case) -> bool:
    """Whether loss and all gradients have the stock backend's bits."""
    assert found.loss is not None
    return torch.equal(found.loss, case[2][0]) and all(map(torch.equal, found.gradients, case[2][1]))


def codecs_used(found: Run) -> set[str | None]:
    """Codecs of what was saved in encoded form."""
    saved = np.flatnonzero(found.result.saved)
    return {found.problem.codec_of(int(s), int(found.placement[s])) for s in saved} - {None}


FIXED = {"bitpack", "narrow16", "narrow8", "relu_mask"}


@pytest.mark.parametrize("timing", ["earliest", "latest"])
@pytest.mark.parametrize(("code", "codecs"), [(COMPRESS, FIXED), (COMPRESS_SWAP, FIXED | {"zvc_exponent", "exponent"})])
def test_lossless_is_bitwise_and_its_peak_exact(case: Case, code: int, codecs: set[str], timing: CopyTiming) -> None:
    found = run(case, place(code), timing)

    assert codecs_used(found) == codecs
    assert same(found, case)
    assert found.measured_peak_bytes == found.result.peak_bytes == found.written_peak_bytes


@pytest.mark.parametrize("budget", [0, 2_500_000, 3_300_000, 1 << 40])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_placements_are_bitwise_and_their_peak_exact(case: Case, seed: int, budget: int) -> None:
    """Every allowed placement at random, under budgets that put waits and reloads at different places."""

    def choose(_: GraphFacts, problem: Problem) -> Placements:
        draw = np.random.default_rng(seed)
        placement = problem.keep_all()
        for s in problem.decisions():
            placement[s] = draw.choice(np.flatnonzero(problem.allowed[s]))
        return placement

    found = run(case, choose, "earliest" if seed % 2 else "latest", budget=budget)

    assert same(found, case)
    assert found.measured_peak_bytes == found.result.peak_bytes == found.written_peak_bytes


@pytest.mark.parametrize("code", [COMPRESS, COMPRESS_SWAP])
def test_lossy_has_an_exact_peak_and_changes_gradients_a_little(case: Case, code: int) -> None:
    found = run(case, place(code), lossy=True)

    assert "int8" in codecs_used(found)
    assert found.measured_peak_bytes == found.result.peak_bytes == found.written_peak_bytes
    assert found.loss is not None
    assert torch.equal(found.loss, case[2][0])
    assert not same(found, case)
    # A bias in front of a normalisation has no gradient but rounding.
    for gradient, exact in [pair for pair in zip(found.gradients, case[2][1], strict=True) if pair[0].dim() > 1]:
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), exact.flatten(), 0) > 0.99


def test_compressing_lowers_the_peak(case: Case) -> None:
    kept, compressed = run(case, place(KEEP)), run(case, place(COMPRESS))

    assert compressed.measured_peak_bytes < kept.measured_peak_bytes


def test_staged_swap_holds_less_than_a_plain_one(case: Case) -> None:
    """Only encoded bytes wait for the link, and only they come back early."""

    def only_masks(code: int) -> Choose:
        def choose(_: GraphFacts, problem: Problem) -> Placements:
            placement = problem.keep_all()
            small = [problem.codec_of(s, COMPRESS) in ("bitpack", "narrow16", "narrow8") for s in range(len(placement))]
            placement[np.array(small)] = code
            return placement

        return choose

    plain, staged = (run(case, only_masks(code), budget=1 << 40) for code in (SWAP, COMPRESS_SWAP))

    assert staged.result.d2h_busy_us < plain.result.d2h_busy_us / 3
    assert staged.result.host_bytes < plain.result.host_bytes / 3
    assert staged.measured_peak_bytes < plain.measured_peak_bytes


def test_instructions_of_encoded_transfers(case: Case) -> None:
    found = run(case, place(COMPRESS_SWAP))
    by_codec: dict[str, list[str]] = {}
    for s in np.flatnonzero(found.result.saved):
        if (codec := found.problem.codec_of(int(s), int(found.placement[s]))) is not None:
            name = found.facts.storages[s].name
            by_codec.setdefault(codec, [item.kind for item in found.program if item.target == name])

    for codec in ("bitpack", "zvc_exponent"):
        assert by_codec[codec][-6:] == ["encode", "swap_out", "swap_out_wait", "swap_in", "swap_in_wait", "decode"]
    targets = [node.target for node in found.forward.graph.nodes]
    assert codec_ops.swap_out_encoded_op in targets
    assert ops.swap_out in targets


def test_holders_at_the_peak_count_encoded_bytes(case: Case) -> None:
    found = run(case, place(COMPRESS, "narrow16"))
    held = dict(holders(found.problem, found.placement, found.result))
    compressed = [s for s in held if found.placement[s] == COMPRESS and found.result.saved[s]]

    assert compressed
    for s in compressed:
        full = found.problem.arrays.storage_bytes[s]
        assert held[s] in (found.problem.arrays.storage_encoded_bytes[s], full, full + held[s] % full)


def test_a_program_without_codecs_changes_nothing(case: Case) -> None:
    found = run(case, place(KEEP))

    assert insert_codecs(found.forward, found.backward, found.program, 1, {}) == (found.forward, found.backward)


def test_an_encode_without_a_codec_is_refused(case: Case) -> None:
    found = run(case, place(KEEP))

    with pytest.raises(PlanMismatchError, match="names no codec"):
        insert_codecs(found.forward, found.backward, (Instruction("encode", "relu"), *found.program), 1, {})


def test_verify_sees_another_codec(case: Case) -> None:
    found = run(case, place(COMPRESS))
    decode = next(node for node in found.backward.graph.nodes if node.target is codec_ops.decode_op)
    decode.args = (*decode.args[:6], "zvc")

    with pytest.raises(GraphRuleError, match="agrees with its encode"):
        verify_codecs(found.forward, found.backward)


def test_verify_sees_an_encode_that_nothing_decodes(case: Case) -> None:
    found = run(case, place(COMPRESS))
    decode = next(node for node in found.backward.graph.nodes if node.target is codec_ops.decode_op)
    decode.replace_all_uses_with(decode.args[0])
    found.backward.graph.erase_node(decode)

    with pytest.raises(GraphRuleError, match="nothing decodes it"):
        verify_codecs(found.forward, found.backward)
