"""Options: what is read, and that each mistake gives one message with the value, what is allowed and what to do."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxhome.errors import OptionError, PlanFileError
from fxhome.options import POLICIES, Budget, Options, format_bytes, parse_budget, parse_bytes
from tests.plan_strategies import EXAMPLE

GIB = 1024**3


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        ("8GiB", 8 * GIB),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 1024**2),
        ("1.5GiB", 3 * GIB // 2),
        (" 2 gib ", 2 * GIB),
        ("1e3 MB", 10**9),
        ("4096", 4096),
        ("0", 0),
        (0, 0),
        (7, 7),
        ("9007199254740993B", 2**53 + 1),
    ],
)
def test_parse_bytes(value: object, size_bytes: int) -> None:
    assert parse_bytes(value, name="host_budget") == size_bytes


@given(st.integers(min_value=0, max_value=2**70))
def test_every_int_is_read_exactly(size_bytes: int) -> None:
    assert parse_bytes(str(size_bytes), name="reserve") == parse_bytes(size_bytes, name="reserve") == size_bytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("8G", r"host_budget='8G' has the unknown unit 'G'; allowed: B, KiB, .*; give an int of bytes or a text"),
        ("8 parsecs", r"has the unknown unit 'parsecs'"),
        ("60%", r"host_budget='60%' has the unknown unit '%'"),
        ("1.5", r"host_budget='1\.5' has no unit; give an int"),
        ("-8GiB", r"host_budget='-8GiB' is negative; give"),
        (-1, r"host_budget=-1 is negative; give"),
        ("1e400GiB", r"host_budget='1e400GiB' is too large; give"),
        ("much", r"host_budget='much' is not a size; give an int of bytes or a text such as '8GiB'"),
        (1.5, r"host_budget=1\.5 is not a size"),
        (True, r"host_budget=True is not a size"),
        ([], r"host_budget=\[\] is not a size"),
    ],
)
def test_parse_bytes_refuses(value: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_bytes(value, name="host_budget")


@pytest.mark.parametrize(
    ("value", "size_bytes", "share", "text"),
    [
        ("8GiB", 8 * GIB, None, "8GiB"),
        (8 * GIB, 8 * GIB, None, "8.00 GiB"),
        (1024**2, 1024**2, None, "1.00 MiB"),
        ("60%", None, 0.6, "60%"),
        (0.6, None, 0.6, "60%"),
        ("0.6", None, 0.6, "0.6"),
        (1.0, None, 1.0, "100%"),
        ("100 %", None, 1.0, "100 %"),
    ],
)
def test_parse_budget(value: object, size_bytes: int | None, share: float | None, text: str) -> None:
    budget = parse_budget(value)

    assert budget == Budget(size_bytes, share)
    assert str(budget) == text


@pytest.mark.parametrize("budget", [Budget(2 * GIB, None), Budget(None, 0.25)])
def test_budget_built_by_hand_is_readable_and_passes_through(budget: Budget) -> None:
    assert parse_budget(budget) is budget
    assert str(budget) in ("2.00 GiB", "25%")


def test_budget_resolves_against_the_baseline() -> None:
    assert parse_budget("60%").resolve(1000) == 600
    assert parse_budget("8GiB").resolve(1000) == 8 * GIB


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, r"memory_budget=1 is 1 bytes, below the least budget of 1 MiB; .*1 is one byte, 1\.0 is 100 %"),
        ("1", r"memory_budget='1' is 1 bytes, below the least budget"),
        (0, r"memory_budget=0 is 0 bytes, below the least budget"),
        (-5, r"memory_budget=-5 is -5 bytes, below the least budget"),
        ("512KiB", r"memory_budget='512KiB' is 524288 bytes, below"),
        (0.0, r"memory_budget=0\.0 is a share outside \(0 %, 100 %\]; give a float in \(0, 1\]"),
        (-0.5, r"memory_budget=-0\.5 is a share outside"),
        (1.5, r"memory_budget=1\.5 is a share outside"),
        ("101%", r"memory_budget='101%' is a share outside"),
        ("0%", r"memory_budget='0%' is a share outside"),
        ("-10%", r"memory_budget='-10%' is a share outside"),
        (float("nan"), r"memory_budget=nan is a share outside"),
        (float("inf"), r"memory_budget=inf is a share outside"),
        ("8 G", r"memory_budget='8 G' has the unknown unit 'G'; allowed: B, KiB"),
        ("-8GiB", r"memory_budget='-8GiB' is negative"),
        ("lots", r"memory_budget='lots' is not a budget; give an int of bytes .*'60%' for a share"),
        (True, r"memory_budget=True is not a budget"),
        (None, r"memory_budget=None is not a budget"),
    ],
)
def test_parse_budget_refuses(value: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_budget(value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (8 * GIB, "8.00 GiB"),
        (GIB - 1, "1.00 GiB"),
        (2**52, "4096.00 TiB"),
    ],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_defaults_come_from_an_empty_mapping() -> None:
    assert Options.from_mapping({}, {}) == Options()


def test_every_option_is_read() -> None:
    options = Options.from_mapping(
        {
            "memory_budget": "20GiB",
            "host_budget": "64GiB",
            "reserve": "1GiB",
            "allow": ["swap"],
            "lossy": True,
            "inner": "inductor",
            "policy": "capuchin",
            "seed": 7,
            "max_evaluations": 10,
            "search_seconds": 2,
            "on_infeasible": "best_effort",
            "plan": EXAMPLE,
            "verify": True,
            "dump_dir": Path("dumps"),
        },
        {},
    )

    assert options == Options(
        memory_budget=Budget(20 * GIB, None),
        host_budget=64 * GIB,
        reserve=GIB,
        allow=frozenset({"swap"}),
        lossy=True,
        inner="inductor",
        policy="capuchin",
        seed=7,
        max_evaluations=10,
        search_seconds=2.0,
        on_infeasible="best_effort",
        plan=EXAMPLE,
        verify=True,
        dump_dir="dumps",
    )
    assert hash(options) == hash(dataclasses.replace(options))


@pytest.mark.parametrize(
    ("given_allow", "allow"), [("swap, recompute", {"swap", "recompute"}), ("", set()), (("compress",), {"compress"})]
)
def test_allow_takes_names_or_a_comma_separated_text(given_allow: object, allow: set[str]) -> None:
    assert Options.from_mapping({"allow": given_allow}, {}).allow == allow


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"memory_bugdet": 1},
        r"unknown option 'memory_bugdet' \(did you mean 'memory_budget'\?\); allowed: memory_budget, ",
    ),
    ({"zzz": 1}, r"unknown option 'zzz'; allowed: memory_budget"),
    ({"lossy": "yes"}, r"lossy='yes' is not a bool; give True or False"),
    ({"lossy": 1}, r"lossy=1 is not a bool"),
    ({"verify": "no"}, r"verify='no' is not a bool"),
    ({"policy": "psoo"}, r"policy='psoo' is not allowed \(did you mean 'pso'\?\); choose one of pso, home, "),
    ({"policy": 3}, r"policy=3 is not allowed; choose one of"),
    ({"inner": "eager"}, r"inner='eager' is not allowed .*choose one of inductor, aot_eager"),
    ({"on_infeasible": "ignore"}, r"on_infeasible='ignore' is not allowed; choose one of error, best_effort"),
    (
        {"allow": "swp"},
        r"allow='swp' is not allowed \(did you mean 'swap'\?\); choose one of swap, recompute, compress",
    ),
    ({"allow": 3}, r"allow=3 is not allowed; give names out of swap, recompute, compress"),
    ({"allow": [3]}, r"allow=3 is not allowed; choose one of"),
    ({"seed": -1}, r"seed=-1 is not allowed; give an int of at least 0"),
    ({"seed": 1.0}, r"seed=1\.0 is not allowed"),
    ({"seed": True}, r"seed=True is not allowed"),
    ({"max_evaluations": 0}, r"max_evaluations=0 is not allowed; give an int of at least 1"),
    ({"search_seconds": -1}, r"search_seconds=-1 is not allowed; give a number of seconds, 0 or more"),
    ({"search_seconds": float("nan")}, r"search_seconds=nan is not allowed"),
    ({"search_seconds": "5"}, r"search_seconds='5' is not allowed"),
    ({"host_budget": "1 lb"}, r"host_budget='1 lb' has the unknown unit 'lb'"),
    ({"reserve": -1}, r"reserve=-1 is negative"),
    ({"reserve": "2GiB", "memory_budget": "1GiB"}, r"reserve=2147483648 leaves nothing of memory_budget=1073741824"),
    ({"plan": 5}, r"plan=5 is not allowed; give a fxhome\.Plan or the path of a plan file"),
    ({"dump_dir": ""}, r"dump_dir='' is not allowed; give the path of a folder"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[repr(values)[:40] for values, _ in REFUSED])
def test_from_mapping_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options.from_mapping(values, {})


def test_a_missing_plan_file_is_refused_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"

    with pytest.raises(PlanFileError, match=re.escape(f"plan file {str(missing)!r} cannot be read")):
        Options.from_mapping({"plan": str(missing)}, {})


def test_the_environment_gives_the_budget_only_where_none_was_given() -> None:
    environ = {"FXHOME_MEMORY_BUDGET": "60%"}

    assert Options.from_mapping({}, environ).memory_budget == Budget(None, 0.6)
    assert Options.from_mapping({"memory_budget": None}, environ).memory_budget == Budget(None, 0.6)
    assert Options.from_mapping({"memory_budget": "1GiB"}, environ).memory_budget == Budget(GIB, None)


def test_a_wrong_budget_in_the_environment_names_the_variable() -> None:
    with pytest.raises(OptionError, match=r"FXHOME_MEMORY_BUDGET='many' is not a budget"):
        Options.from_mapping({}, {"FXHOME_MEMORY_BUDGET": "many"})


@pytest.mark.parametrize(
    "change",
    [{"memory_budget": Budget(GIB, None)}, {"reserve": 1}, {"allow": frozenset()}, {"seed": 1}, {"plan": EXAMPLE}],
)
def test_cache_key_depends_on_what_changes_a_plan(change: dict[str, Any]) -> None:
    assert Options(**change).cache_key() != Options().cache_key()


def test_cache_key_ignores_inspection_and_spelling() -> None:
    assert Options(verify=True, dump_dir="x").cache_key() == Options().cache_key()
    spellings = ("1GiB", "1024MiB", GIB)
    assert len({Options.from_mapping({"memory_budget": text}, {}).cache_key() for text in spellings}) == 1


def test_cache_key_reads_a_plan_file_not_its_path(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    EXAMPLE.save(first)
    EXAMPLE.save(second)
    key = Options(plan=str(first)).cache_key()

    assert Options(plan=str(second)).cache_key() == key
    dataclasses.replace(EXAMPLE, budget_bytes=EXAMPLE.budget_bytes + 512).save(first)
    assert Options(plan=str(first)).cache_key() != key


def test_policies_have_no_duplicates_and_the_default_is_one() -> None:
    assert len(set(POLICIES)) == len(POLICIES)
    assert Options().policy in POLICIES
