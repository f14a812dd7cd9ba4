"""The one runner of the planning steps: it names and times each, and dumps the graphs behind it where asked to."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch.fx.graph_module import GraphModule

from fxhome.errors import OptionError

log = logging.getLogger("fxhome.planner")

T = TypeVar("T")


class Runner:
    """Names and times every step, and dumps the graphs after it where `dump_dir` is set."""

    def __init__(self, dump_dir: str | None) -> None:
        self.seconds: dict[str, float] = {}
        self._folder = Path(dump_dir) if dump_dir is not None else None
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OptionError(
                    f"dump_dir={dump_dir!r} cannot be made ({error.strerror}); give a folder that exists or can be made"
                ) from error

    def run(self, name: str, step: Callable[[], T]) -> T:
        """Run one step."""
        begin = time.perf_counter()
        result = step()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
        log.debug("%s took %.3f s", name, self.seconds[name])
        self._dump(name, result)
        return result

    def _dump(self, name: str, result: object) -> None:
        if self._folder is None:
            return
        modules = result if isinstance(result, tuple) else (result,)
        for side, module in zip(("forward", "backward"), modules, strict=False):
            if isinstance(module, GraphModule):
                label = side if isinstance(result, tuple) else "joint"
                number = len(self.seconds)
                text = module.print_readable(print_output=False, include_stride=True, include_device=True)
                (self._folder / f"{number:02d}_{name}_{label}.py").write_text(text, encoding="utf-8")
