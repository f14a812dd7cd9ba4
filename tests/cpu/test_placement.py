"""Plans: JSON both ways, refusal of files that are not plans, identity, and the promise that is printed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from fxhome.errors import PlanFileError
from fxhome.placement import Instruction, Placement, Plan, load_plans, save_plans
from tests.plan_strategies import EXAMPLE, MEASURED, MIB, plans


@given(plans)
def test_json_round_trip(plan: Plan) -> None:
    copy = Plan.from_json(json.loads(json.dumps(plan.to_json())))

    # Measurements and search time take no part in ==, but must survive all the same.
    assert copy == plan
    assert dataclasses.asdict(copy) == dataclasses.asdict(plan)
    assert copy.fingerprint() == plan.fingerprint()


def test_a_file_of_several_plans_keeps_their_order(tmp_path: Path) -> None:
    other = dataclasses.replace(EXAMPLE, graph_fingerprint="other")
    save_plans(tmp_path / "plans.json", [EXAMPLE, other])

    assert load_plans(tmp_path / "plans.json") == (EXAMPLE, other)
    with pytest.raises(PlanFileError, match=r"holds 2 plans \(one per graph\), where one was expected"):
        Plan.load(tmp_path / "plans.json")


def test_save_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    EXAMPLE.save(path)
    MEASURED.save(path)

    assert Plan.load(path).measured_peak_bytes == MEASURED.measured_peak_bytes
    assert list(tmp_path.iterdir()) == [path]


def test_save_into_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"plan\.json' cannot be written: No such file or directory; give a path"):
        EXAMPLE.save(tmp_path / "none" / "plan.json")


def broken(**changes: Any) -> dict[str, Any]:
    return {"schema": 1, "plans": [EXAMPLE.to_json() | changes]}


def without(key: str) -> dict[str, Any]:
    document = EXAMPLE.to_json()
    del document[key]
    return {"schema": 1, "plans": [document]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"is not JSON: .*; make it again with `fxhome plan -o`"),
        ('{"schema": 1, "plans": [', r"is not JSON"),
        ("\x00\x01", r"is not JSON"),
        ("[]", r"is not a plan: it should be an object with 'schema' and 'plans'"),
        ('{"plans": []}', r"is not a plan"),
        ('{"schema": 1, "plans": 3}', r"is not a plan"),
        (
            '{"schema": 2, "plans": []}',
            r"has schema 2, this version reads schema 1; make it again with `fxhome plan -o`",
        ),
        ('{"schema": 1, "plans": [3]}', r"is a plan should be a JSON object, got int"),
        (json.dumps(without("inner")), r"is not a plan of schema 1: plan lacks inner"),
        (json.dumps(without("program")), r"plan\.program should be a list, got None"),
        (json.dumps(broken(colour="red")), r"plan has unknown keys colour"),
        (json.dumps(broken(budget_bytes="8GiB")), r"plan\.budget_bytes should be int, got '8GiB'"),
        (json.dumps(broken(budget_bytes=True)), r"plan\.budget_bytes should be int, got True"),
        (
            json.dumps(broken(program=[["jump", "x"]])),
            r"plan\.program\[0\]: unknown instruction kind 'jump'; allowed: dec",
        ),
        (json.dumps(broken(program=[["op"]])), r"plan\.program\[0\] should have 2 entries, got 1"),
        (json.dumps(broken(search=None)), r"plan\.search should be an object, got None"),
        (
            json.dumps(broken(placements=[EXAMPLE.to_json()["placements"][0] | {"placement": "burn"}])),
            r"plan\.placements\[0\]\.placement should be one of keep, swap, .*, got 'burn'",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(PlanFileError, match=message) as caught:
        load_plans(path)
    assert repr(str(path)) in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x80")

    with pytest.raises(PlanFileError, match=r"is not JSON"):
        load_plans(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        PlanFileError, match=r"none\.json' cannot be read: No such file .*make one with `fxhome plan -o`"
    ):
        Plan.load(tmp_path / "none.json")


def test_bytes_by_placement_has_every_placement_and_loses_nothing() -> None:
    totals = EXAMPLE.bytes_by_placement()

    assert totals == {
        Placement.KEEP: 96 * MIB,
        Placement.SWAP: 256 * MIB,
        Placement.RECOMPUTE: 64 * MIB,
        Placement.RECOMPUTE_EACH: 32 * MIB,
        Placement.COMPRESS: 16 * MIB,
        Placement.COMPRESS_SWAP: 8 * MIB,
    }


def test_measurements_change_neither_equality_nor_fingerprint() -> None:
    assert (MEASURED.measured_peak_bytes, MEASURED.measured_step_seconds) == (588 * MIB, 0.126)
    assert EXAMPLE.measured_peak_bytes is None
    assert MEASURED == EXAMPLE
    assert hash(MEASURED) == hash(EXAMPLE)
    assert MEASURED.fingerprint() == EXAMPLE.fingerprint()


def test_search_time_is_no_part_of_the_plan() -> None:
    """The same seed gives the same plan, however long the search took."""
    slower = dataclasses.replace(EXAMPLE, search=dataclasses.replace(EXAMPLE.search, seconds=99.0))

    assert slower == EXAMPLE


@pytest.mark.parametrize(
    "change",
    [
        {"graph_fingerprint": "x"},
        {"device_fingerprint": "x"},
        {"versions": (("torch", "2.11.0"),)},
        {"inner": "inductor"},
        {"budget_bytes": 1},
        {"placements": EXAMPLE.placements[1:]},
        {"program": EXAMPLE.program[::-1]},
    ],
)
def test_fingerprint_covers_what_a_replay_needs(change: dict[str, Any]) -> None:
    assert dataclasses.replace(EXAMPLE, **change).fingerprint() != EXAMPLE.fingerprint()


def test_an_unknown_instruction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown instruction kind 'jump'; allowed: decode, encode"):
        Instruction("jump", "x")


def test_text_shows_asked_predicted_and_measured_together() -> None:
    lines = str(EXAMPLE).splitlines()

    assert lines[1].split() == ["asked", "predicted", "measured"]
    assert lines[2].split() == ["peak", "memory", "600.00", "MiB", "590.00", "MiB", "not", "measured"]
    assert str(MEASURED).splitlines()[2].endswith("588.00 MiB")
    assert "swap 256.00 MiB" in str(EXAMPLE)
    assert "must stay: 1 storages, 2.00 MiB" in str(EXAMPLE)
    assert "stopped by convergence, 2.5% above the lower bound" in str(EXAMPLE)
    assert "note: the search was seeded from the baselines" in str(EXAMPLE)


def test_an_offline_plan_calls_itself_an_estimate() -> None:
    assert str(dataclasses.replace(EXAMPLE, estimated=True)).startswith("fxhome estimated plan for graph a1b2c3d4e5f6")
