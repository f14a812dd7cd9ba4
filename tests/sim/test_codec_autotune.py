"""Self-tuning on synthetic timings: finds what exhaustive search finds with fewer trials, keeps to its time, survives
on disk."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fxhome.cuda_kernels import CodecError, codec_by_name
from fxhome.cuda_kernels.autotune import (
    SLACK,
    TunedGeometry,
    apply_tuned,
    cache_path,
    candidates,
    load_tuned,
    pick,
    save_tuned,
    search_geometry,
    tune,
    tuning_keys,
)
from fxhome.cuda_kernels.gaussian_process import SearchResult, fit_predict, minimise
from fxhome.cuda_kernels.geometry import (
    Geometry,
    GeometryKey,
    choose_geometry,
    clear_geometry,
    size_class,
)

ENCODE = GeometryKey("zvc", "encode", 4, 28)
DECODE = GeometryKey("zvc", "decode", 4, 28)


def saturating(best_blocks: float, best_threads: float, noise: float, seed: int):  # type: ignore[no-untyped-def]
    """A timing like a GPU's: too few threads starve the memory, too many disturb it a little."""
    generator = np.random.default_rng(seed)

    def timer(key: GeometryKey, geometry: Geometry) -> float:
        lack = max(0.0, math.log2(best_blocks / geometry.blocks))
        excess = max(0.0, math.log2(geometry.blocks / best_blocks))
        wrong_threads = abs(math.log2(geometry.threads / best_threads))
        ideal = 1e-3 * (1 + 0.6 * lack + 0.08 * excess + 0.2 * wrong_threads)
        return ideal * (1 + noise * float(generator.standard_normal()))

    return timer


@pytest.mark.parametrize("best_blocks", [264, 528, 1056, 4224])
@pytest.mark.parametrize("best_threads", [64, 256])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_bayesian_search_is_near_exhaustive_with_half_the_trials(
    best_blocks: int, best_threads: int, noise: float
) -> None:
    exact = saturating(best_blocks, best_threads, 0.0, 0)
    _, everything = search_geometry(ENCODE, exact, method="exhaustive")

    chosen, result = search_geometry(ENCODE, saturating(best_blocks, best_threads, noise, 1), seed=3)

    assert len(result.costs) <= len(candidates(ENCODE)) // 2
    assert exact(ENCODE, chosen) <= everything.best_cost * (1 + 0.05 + 2 * noise + (SLACK - 1))


def test_same_seed_same_choice() -> None:
    runs = [search_geometry(DECODE, saturating(528, 128, 0.0, 0), seed=5) for _ in range(2)]

    assert runs[0][0] == runs[1][0]
    assert list(runs[0][1].costs) == list(runs[1][1].costs)


def test_leanest_of_equally_fast_geometries_is_kept() -> None:
    options = [Geometry(1056, 256), Geometry(64, 128), Geometry(32, 128)]
    result = SearchResult(0, 1.0, {0: 1.0, 1: 1.0 + (SLACK - 1) / 2, 2: 1.2}, "all points")

    assert pick(options, result) == Geometry(64, 128)


def test_gaussian_process_interpolates_and_knows_where_it_does_not_know() -> None:
    seen = np.array([[0.0], [0.5], [1.0]])
    posterior = fit_predict(seen, np.array([1.0, 0.0, 1.0]), np.array([[0.0], [0.5], [0.25]]))

    assert posterior.mean[0] == pytest.approx(1.0, abs=0.02)
    assert posterior.mean[1] == pytest.approx(0.0, abs=0.02)
    assert posterior.deviation[2] > posterior.deviation[1]


def test_search_says_why_it_stopped() -> None:
    points = np.arange(30.0)[:, None]

    assert minimise(points, lambda index: 1.0 + index, 6).stopped_by == "evaluations"
    assert minimise(points, lambda index: 1.0, 30).stopped_by == "converged"
    assert minimise(points[:4], lambda index: 1.0 + index, 30).stopped_by == "all points"
    assert minimise(points, lambda index: 1.0 + index, 30, out_of_time=lambda: True).stopped_by == "time"


def test_no_time_means_no_change() -> None:
    assert tune([ENCODE, DECODE], saturating(64, 128, 0.0, 0), seconds=0.0) == []


def test_unknown_method_is_refused() -> None:
    with pytest.raises(CodecError, match="allowed: bayesian, exhaustive"):
        search_geometry(ENCODE, saturating(64, 128, 0.0, 0), method="guess")


def test_cache_round_trip_merges_and_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))
    tuned = tune([ENCODE, DECODE], saturating(64, 128, 0.0, 0))
    save_tuned("Some GPU", tuned)
    newer = TunedGeometry(ENCODE, Geometry(48, 64), 1e-3)
    save_tuned("Some GPU", [newer])

    loaded = load_tuned("Some GPU")

    assert set(loaded) == {newer, tuned[1]}
    assert load_tuned("Another GPU") == []
    apply_tuned(0, loaded)
    assert choose_geometry(0, ENCODE, 132, 256, 1 << 20) == Geometry(48, 64)
    clear_geometry()
    assert choose_geometry(0, ENCODE, 132, 256, 1 << 20) != Geometry(48, 64)


def test_damaged_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))
    save_tuned("Some GPU", [])
    cache_path("Some GPU").write_text('{"version": 2, "device": "Some GPU", "tuned": [{}]}')

    with pytest.raises(CodecError, match="delete it and tune again"):
        load_tuned("Some GPU")


def test_geometry_never_exceeds_the_work() -> None:
    assert choose_geometry(0, DECODE, 132, 256, 1) == Geometry(1, 256)
    assert [size_class(size) for size in (1, 1 << 20, (1 << 25) + 1, 1 << 40)] == [20, 20, 25, 30]


def test_the_planners_codecs_are_tuned_and_every_key_moves_the_bar() -> None:
    keys, moves = tuning_keys(), []

    tuned = tune(keys, saturating(528, 128, 0.0, 0), advance=lambda: moves.append(None))

    assert len(tuned) == len(moves) == len(set(keys))
    assert {"zvc", "exponent", "bitpack", "int8"} <= {key.codec for key in keys}
    assert all(key.size_class <= 24 for key in keys if not codec_by_name(key.codec).fixed_rate)
