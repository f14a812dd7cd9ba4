"""What laying blocks rests on, asked of a real allocator: `PYTHONPATH=. python tests/gpu/probe_blocks.py` prints JSON.

model     raw allocations and frees, at random: does every block lie where best fit says?
steer     plugs and spacers before an operator: does its result lie where it was sent?
cost      microseconds of each call that steering or recording makes
trace     what the history shows of markers, a convolution and a backward; what a snapshot shows
cap       what growing, giving back and one large block do at a limit
code      what Inductor generates for a small graph
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch

MIB = 1 << 20
PAGE = 20 * MIB
MARK = 77

take = torch._C._cuda_cudaCachingAllocator_raw_alloc
give = torch._C._cuda_cudaCachingAllocator_raw_delete


class Heap:
    """Best fit in one expandable segment that starts empty at `base`."""

    def __init__(self, base: int, end: int) -> None:
        self.holes = [(base, end - base)]
        self.end = end

    def place(self, size: int) -> tuple[int, bool]:
        """(address, whether the segment grew)."""
        fits = [h for h in self.holes if h[1] >= size]
        inner = [h for h in fits if sum(h) != self.end]
        grew = False
        if inner or fits:
            start, length = min(inner or fits, key=lambda h: (h[1], h[0]))
            self.holes.remove((start, length))
        else:
            last = [h for h in self.holes if sum(h) == self.end]
            start = last[0][0] if last else self.end
            if last:
                self.holes.remove(last[0])
            self.end += -(-(start + size - self.end) // PAGE) * PAGE
            length, grew = self.end - start, True
        if length > size:
            self.holes.append((start + size, length - size))
        return start, grew

    def free(self, start: int, size: int) -> None:
        for hole in list(self.holes):
            if sum(hole) == start:
                self.holes.remove(hole)
                start, size = hole[0], size + hole[1]
            elif hole[0] == start + size:
                self.holes.remove(hole)
                size += hole[1]
        self.holes.append((start, size))


def large_segments() -> list[dict[str, Any]]:
    found = torch.cuda.memory._snapshot()["segments"]
    return [
        {key: value for key, value in s.items() if key not in ("blocks", "frames")}
        | {"blocks": [(b["address"], b["size"], b["requested_size"], b["state"]) for b in s["blocks"]]}
        for s in found
        if s["segment_type"] == "large"
    ]


def fresh() -> int:
    """An empty allocator; the address at which its large segment starts."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = take(40 * MIB, stream())
    give(base)
    return int(base)


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def model(events: int = 3000) -> dict[str, Any]:
    base = fresh()
    draw = random.Random(1)
    heap = Heap(base, base + 2 * PAGE)
    alive: dict[int, int] = {}
    wrong = []
    for i in range(events):
        if alive and (draw.random() < 0.5 or len(alive) > 60):
            address = draw.choice(sorted(alive))
            give(address)
            heap.free(address, alive.pop(address))
        else:
            size = draw.choice(
                [
                    MIB + 512,
                    2 * MIB,
                    3 * MIB,
                    20 * MIB,
                    draw.randrange(2049, 80000) * 512,
                    draw.randrange(1 << 20, 1 << 26),
                ]
            )
            rounded = -(-size // 512) * 512
            if rounded <= MIB:
                continue
            expected, grew = heap.place(rounded)
            got = take(size, stream())
            alive[got] = rounded
            if got != expected:
                wrong.append([i, rounded, got - base, expected - base, grew])
                break
    for address in alive:
        give(address)
    return {"events": events, "wrong": wrong, "mapped": heap.end - base, "reserved": torch.cuda.memory_reserved()}


def steer() -> dict[str, Any]:
    """Holes of 30 (twice), 25, 50 and 60 MiB between live blocks; each case sends 22 MiB or 40 MiB somewhere."""
    base = fresh()
    s = stream()
    layout = [
        ("w", 8),
        ("a", 30),
        ("w", 4),
        ("b", 25),
        ("w", 4),
        ("c", 60),
        ("w", 4),
        ("d", 30),
        ("w", 4),
        ("e", 50),
        ("w", 9),
    ]
    blocks = [(name, take(size * MIB, s)) for name, size in layout]
    at = {name: address for name, address in blocks if name != "w"}
    for name, address in blocks:
        if name != "w":
            give(address)
    found: dict[str, Any] = {"holes": {name: address - base for name, address in at.items()}}

    def sent(plugs: list[int], size: int) -> list[Any]:
        """Plugs in MiB (fractions allowed), then an operator's result."""
        taken = [take(int(p * MIB), s) for p in plugs]
        result = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        for address in taken:
            give(address)
        where = result.data_ptr()
        return [[p - base for p in taken], where - base]

    found["22 alone goes to b"] = sent([], 22)
    found["22 past b goes to a"] = sent([25], 22)
    found["22 past b and a goes to d"] = sent([25, 30], 22)
    found["22 past b, a and d goes to e"] = sent([25, 30, 30], 22)
    found["22 past b a d e goes to c"] = sent([25, 30, 30, 50], 22)
    found["40 past e goes to c"] = sent([50], 40)
    found["22 in c behind 10: b a d e, spacer of 10"] = sent([25, 30, 30, 50, 10], 22)
    found["22 in c behind 1 MiB + 512"] = sent([25, 30, 30, 50, 1 + 512 / MIB], 22)
    found["after all of it, alone"] = sent([], 22)
    workspace = torch.ones(1024, 1024, device="cuda") @ torch.ones(1024, 1024, device="cuda")
    del workspace
    for name, address in blocks:
        if name == "w":
            give(address)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    give(take(200 * MIB, s))
    found["a plug counts as allocated, MiB"] = (torch.cuda.max_memory_allocated() - before) / MIB
    return found


def timed(work: Callable[[], Any], count: int) -> float:
    work()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    return round((time.perf_counter() - begin) / count * 1e6, 3)


def cost() -> dict[str, Any]:
    base = fresh()
    s = stream()
    holes = [take((2 + i % 7) * MIB, s) for i in range(400)]
    for address in holes[::2]:
        give(address)
    found = {
        "take and give 24 MiB, us": timed(lambda: give(take(24 * MIB, s)), 2000),
        "take and give 5 MiB among 200 holes, us": timed(lambda: give(take(5 * MIB, s)), 2000),
        "take and give 77 bytes, us": timed(lambda: give(take(MARK, s)), 2000),
        "torch.empty 24 MiB, us": timed(lambda: torch.empty(24 * MIB, dtype=torch.uint8, device="cuda"), 2000),
        "memory_allocated, us": timed(torch.cuda.memory_allocated, 500),
        "_cuda_memoryStats, us": timed(lambda: torch._C._cuda_memoryStats(0), 500),
        "getCurrentRawStream, us": timed(lambda: torch._C._cuda_getCurrentRawStream(0), 2000),
        "snapshot of 400 blocks, ms": timed(torch.cuda.memory._snapshot, 5) / 1e3,
        "_cuda_memorySnapshot of 400 blocks, ms": timed(lambda: torch._C._cuda_memorySnapshot(None), 5) / 1e3,
    }
    for address in holes[1::2]:
        give(address)
    recording(True)
    found["take and give 24 MiB while recording, us"] = timed(lambda: give(take(24 * MIB, s)), 2000)
    found["snapshot with 6000 entries, ms"] = timed(torch.cuda.memory._snapshot, 2) / 1e3
    recording(False)
    found["base moved"] = fresh() != base
    return found


def recording(on: bool) -> None:
    torch.cuda.memory._record_memory_history(
        enabled="all" if on else None, context=None, stacks="python", max_entries=100000, clear_history=True
    )


def trace() -> dict[str, Any]:
    fresh()
    s = stream()
    convolution = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda().to(memory_format=torch.channels_last)
    linear = torch.nn.Linear(4096, 4096).cuda()
    x = torch.randn(64, 64, 56, 56, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    y = torch.randn(2048, 4096, device="cuda", requires_grad=True)
    for _ in range(2):
        (convolution(x).square().mean() + linear(y).square().mean()).backward()
    before = torch._C._cuda_isHistoryEnabled()
    recording(True)
    during = torch._C._cuda_isHistoryEnabled()
    give(take(MARK, s))
    a = torch.empty(24 * MIB + 5, dtype=torch.uint8, device="cuda")
    give(take(MARK, s))
    loss = convolution(x).square().mean()
    give(take(MARK, s))
    loss.backward()
    give(take(MARK, s))
    linear(y).square().mean().backward()
    give(take(MARK, s))
    del a
    for p in convolution.parameters():
        p.grad = None
    shown = torch.cuda.memory._snapshot()
    recording(False)
    entries = shown["device_traces"][0]
    return {
        "history before, during, after": [before, during, torch._C._cuda_isHistoryEnabled()],
        "keys": sorted(entries[0]),
        "first": {k: v for k, v in entries[0].items() if k != "frames"},
        "entries": [[e["action"], e["addr"], e["size"], e["stream"]] for e in entries][:140],
        "entries after clearing": len(torch.cuda.memory._snapshot()["device_traces"][0]),
        "segments": large_segments()[:4],
    }


def cap() -> dict[str, Any]:
    base = fresh()
    s = stream()
    start = torch.cuda.memory_reserved()
    found: dict[str, Any] = {"reserved at first": start / MIB}
    kept = take(30 * MIB, s)  # an obstacle at the start
    big = take(8000 * MIB, s)
    stones = []
    give(big)
    for _ in range(8):
        stones.append((take(900 * MIB, s), take(3 * MIB, s)))
    for big, _ in stones:
        give(big)
    found["stones"] = [small - base for _, small in stones]
    begin = time.perf_counter()
    torch.cuda.empty_cache()
    found["empty_cache of 8 GB, ms"] = (time.perf_counter() - begin) * 1e3
    found["reserved after it"] = torch.cuda.memory_reserved() / MIB
    found["segments after it"] = [(g["address"] - base, g["total_size"]) for g in large_segments()]
    begin = time.perf_counter()
    extent = take(4000 * MIB, s)
    found["mapping 4 GB, ms"] = (time.perf_counter() - begin) * 1e3
    found["where 4000 MiB went"] = extent - base
    give(extent)
    found["4 more in it"] = [(take(3 * MIB, s) - base) / MIB, (take(850 * MIB, s) - base) / MIB]
    found["segments behind"] = [(g["address"] - base, g["total_size"]) for g in large_segments()]
    total = torch.cuda.get_device_properties(0).total_memory
    reserved = torch.cuda.memory_reserved()
    # Room for 300 MiB: the end's hole of about 3100 MiB needs 250 more for 3350.
    torch.cuda.set_per_process_memory_fraction((reserved + 300 * MIB) / total)
    torch.cuda.memory.reset_accumulated_memory_stats()
    outcome = []
    for size in (3100, 3250, 3350):
        begin = time.perf_counter()
        try:
            address = take(size * MIB, s)
            outcome.append([size, address - base, (time.perf_counter() - begin) * 1e3])
            give(address)
        except torch.OutOfMemoryError as error:
            outcome.append([size, str(error)[:80], (time.perf_counter() - begin) * 1e3])
        stats = torch.cuda.memory_stats()
        outcome[-1] += [torch.cuda.memory_reserved() / MIB, stats["num_alloc_retries"], stats["num_ooms"]]
    found["at the cap: size, where, ms, reserved, retries, ooms"] = outcome
    found["segments at the end"] = [(g["address"] - base, g["total_size"]) for g in large_segments()]
    torch.cuda.set_per_process_memory_fraction(1.0)
    give(kept)
    return found


def code() -> dict[str, Any]:
    from torch._inductor import compile_fx as module
    from torch._inductor.utils import run_fw_bw_and_get_code

    kinds = []
    inner = module.compile_fx_inner

    def seen(graph: Any, inputs: Any, **settings: Any) -> Any:
        compiled = inner(graph, inputs, **settings)
        call = compiled.current_callable
        kinds.append([type(compiled).__name__, repr(call)[:200], sorted(getattr(call, "__globals__", {}))[:80]])
        kinds[-1].append(str(getattr(call, "__self__", None))[:80])
        return compiled

    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3, padding=1),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 256, 1000),
    ).cuda()
    x = torch.randn(64, 3, 16, 16, device="cuda")
    torch._functorch.config.enable_autograd_cache = False

    def backend(gm: Any, inputs: Any) -> Any:
        return module.compile_fx(gm, inputs, inner_compile=seen)

    compiled = torch.compile(net, backend=backend)
    _, sources = run_fw_bw_and_get_code(lambda: compiled(x))
    tails = [source[source.find("async_compile.wait(globals())") :][:9000] for source in sources]
    return {"callables": kinds, "sources": tails}


def main() -> None:
    """Every part by itself: what one of them raises is its result."""
    torch.ones(1, device="cuda")
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for part in (model, steer, cost, trace, cap, code):
        begin = time.perf_counter()
        try:
            found[part.__name__] = part()
        except Exception:
            found[part.__name__] = traceback.format_exc()[-1500:]
            torch.cuda.set_per_process_memory_fraction(1.0)
        found[f"{part.__name__} took, s"] = round(time.perf_counter() - begin, 2)
    for name, value in found.items():
        if name == "code" and isinstance(value, dict):
            for source in value.pop("sources"):
                print(source)
        print(json.dumps({name: value}))


if __name__ == "__main__":
    main()
