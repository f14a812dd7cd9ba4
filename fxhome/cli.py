"""The command line: `fxhome run | plan | show | profile`.

With --json the result, and nothing else, goes to stdout; progress and messages go to stderr. A user's mistake ends with
exit status 2 and one message.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from fxhome import __version__, cli_commands
from fxhome.errors import FxhomeError, GraphRuleError
from fxhome.options import ALLOWED, INNER_BACKENDS, ON_INFEASIBLE, POLICIES
from fxhome.progress import progress_shown

_SPEC_HELP = "torchvision:resnet50, transformers:gpt2 or path/to/file.py:factory (factory(batch_size) -> model, args)"
_BYTE_OPTIONS = frozenset({"--memory-budget", "--host-budget", "--reserve"})
_PLAIN_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    arguments = parser().parse_args(_with_negative_values(sys.argv[1:] if argv is None else argv))
    stdout = sys.stdout
    try:
        # Whatever a library prints while we work must not mix with the result on stdout.
        with contextlib.redirect_stdout(sys.stderr), progress_shown(True if arguments.progress else None):
            result = arguments.command(arguments)
        if arguments.json:
            print(json.dumps(result.document(), indent=1, allow_nan=False))
        else:
            result.show(Console(file=stdout, width=None if stdout.isatty() else _PLAIN_WIDTH))
        stdout.flush()
    except GraphRuleError:
        # fxhome's own defect: here the traceback is the message.
        raise
    except FxhomeError as error:
        print(f"fxhome {arguments.name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing more to say, and no complaint at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        return 141
    return 0


def _with_negative_values(argv: Sequence[str]) -> list[str]:
    """`--memory-budget -5MB` as one word: argparse would take the value for an option and never name it."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] in _BYTE_OPTIONS and word[:1] == "-" and word[1:2].isdigit():
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def parser() -> argparse.ArgumentParser:
    """The whole command line; each command's function is in `command`."""
    top = argparse.ArgumentParser(prog="fxhome", description="Train a PyTorch model inside a byte budget.")
    top.add_argument("--version", action="version", version=f"fxhome {__version__}")
    commands = top.add_subparsers(dest="name", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train a few steps without and with a plan, side by side")
    run.set_defaults(command=cli_commands.run)
    _add_model_arguments(run)
    run.add_argument("--steps", type=int, default=5, metavar="K", help="timed steps (default: 5)")
    run.add_argument("--device", metavar="D", help="cpu or cuda (default: cuda where there is one)")
    run.add_argument("--plan", metavar="PLAN", help="replay this plan file instead of searching")
    _add_output_arguments(run)

    plan = commands.add_parser("plan", help="plan offline: nothing is executed, no memory is taken")
    plan.set_defaults(command=cli_commands.plan)
    _add_model_arguments(plan)
    plan.add_argument("--device", metavar="D", help="cpu, cuda or a profile.json written by `fxhome profile`")
    plan.add_argument("-o", "--output", metavar="FILE", help="write the plan (with --sweep: the front, as JSON) here")
    plan.add_argument("--sweep", action="store_true", help="search many budgets and show peak against step time")
    plan.add_argument("--budgets", nargs="+", metavar="B", help="with --sweep: which ones, such as 80%% 60%% 8GiB")
    plan.add_argument("--plot", metavar="FILE", help="with --sweep: draw the front here (needs matplotlib)")
    _add_output_arguments(plan)

    show = commands.add_parser("show", help="show a plan file")
    show.set_defaults(command=cli_commands.show)
    show.add_argument("path", metavar="PLAN", help="a plan file")
    _add_output_arguments(show)

    profile = commands.add_parser("profile", help="measure this device once")
    profile.set_defaults(command=cli_commands.profile)
    profile.add_argument("--device", metavar="D", help="cpu or cuda (default: cuda where there is one)")
    profile.add_argument("-o", "--output", metavar="FILE", help="write the profile here")
    _add_output_arguments(profile)
    return top


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """SPEC and the options of `fxhome.options.Options`, which checks their values."""
    parser.add_argument("spec", metavar="SPEC", help=_SPEC_HELP)
    parser.add_argument("--batch-size", type=int, metavar="N", help="default: 4 on CPU, 64 on CUDA")
    options = parser.add_argument_group("options of the plan")
    options.add_argument("--memory-budget", metavar="B", help="8GiB, 512MiB, 60%% of the baseline's peak; default: all")
    options.add_argument("--host-budget", metavar="B", help="host memory for swapped tensors")
    options.add_argument("--reserve", metavar="B", help="part of the budget kept free, e.g. for optimizer state")
    options.add_argument("--allow", metavar="A,B", help=f"subset of {','.join(ALLOWED)}")
    options.add_argument("--lossy", action="store_const", const=True, help="allow codecs that lose precision")
    options.add_argument("--inner", metavar="I", help=f"{' or '.join(INNER_BACKENDS)}")
    options.add_argument("--policy", metavar="P", help=f"one of {', '.join(POLICIES)}")
    options.add_argument("--seed", type=int, metavar="S", help="of the search, the weights and the data (default: 0)")
    options.add_argument("--max-evaluations", type=int, metavar="N", help="end of the search")
    options.add_argument("--search-seconds", type=float, metavar="T", help="safety cap on the search")
    options.add_argument("--on-infeasible", metavar="X", help=f"{' or '.join(ON_INFEASIBLE)}")
    options.add_argument("--verify", action="store_const", const=True, help="check the graph rules after each step")
    options.add_argument("--dump-dir", metavar="DIR", help="write the graphs after each step here")


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    parser.add_argument("--progress", action="store_true", help="show progress even where stderr is no terminal")


if __name__ == "__main__":
    sys.exit(main())
