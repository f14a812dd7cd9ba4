"""The README keeps up with the code: its commands parse, its options are all there."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fxhome import cli
from fxhome.options import Options

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

COMMANDS = [line.split("#")[0] for line in README.splitlines() if line.startswith("fxhome ")] + [
    line.partition("&& ")[2] for line in README.splitlines() if "&& fxhome" in line
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command: str) -> None:
    arguments = cli.parser().parse_args(shlex.split(command)[1:])

    assert callable(arguments.command)


def test_there_are_commands() -> None:
    assert {command.split()[1] for command in COMMANDS} == {"run", "plan", "show", "profile"}


def test_every_option_is_in_the_table() -> None:
    table = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `")]
    documented = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}

    assert documented == {field.name for field in dataclasses.fields(Options)}


def test_every_option_of_the_command_line_is_an_option() -> None:
    """And the reverse: whatever a front door takes can be typed, the plan to replay only where something runs."""
    arguments = vars(cli.parser().parse_args(["run", "x:y"]))

    assert {field.name for field in dataclasses.fields(Options)} <= arguments.keys()


def test_the_set_up_commands_name_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    installs = re.findall(r"^pip install -e '\.\[(\w+)\]' && (\w+)", README, flags=re.MULTILINE)

    assert installs == [("models", "fxhome"), ("dev", "pytest")]
    assert {extra for extra, _ in installs} <= extras.keys()
