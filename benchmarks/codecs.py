"""Codec kernels against the plain copy: python -m benchmarks.codecs [--out benchmarks/results] [--size-mib 256]

Every kernel is checked against its reference first. Each section fails alone: its traceback is printed and its row
says so. Multiples are of the best plain copy (registered huge pages) of the same run; "in a row": several tensors are
queued as in a step, so that one is encoded while another is copied. GB are 1e9 bytes of the plain
tensor.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.codec_checks import FLOATS, check_codec, compile_all, random_tensor
from benchmarks.codec_data import trained_activations
from benchmarks.codec_host import host_cost
from benchmarks.codec_report import Report, as_markdown, environment
from benchmarks.codec_timing import (
    DEVICE,
    STREAM,
    Rates,
    RoundTrip,
    median_ms,
    plain_rates,
    registered_buffer,
    synchronize,
)
from fxhome.cuda_kernels import codec_by_name, codec_names, raise_if_corrupt
from fxhome.cuda_kernels.autotune import DeviceTimer, search_geometry, tune_codecs, tuning_keys
from fxhome.cuda_kernels.geometry import Geometry, GeometryKey, clear_geometry, set_geometry, size_class


class Bench:
    def __init__(self, report: Report, size_bytes: int) -> None:
        self.report = report
        self.size_bytes = size_bytes
        self.host = registered_buffer(size_bytes)
        self.rates = Rates(1, 1, 1)
        self.dense_tensor = torch.empty(0, dtype=torch.bfloat16, device=DEVICE)

    def plain(self) -> None:
        self.rates = plain_rates(self.host, self.size_bytes)
        self.report.add(
            "plain copy", "registered huge pages", to_host_gbs=self.rates.to_host, from_host_gbs=self.rates.from_host,
            on_device_gbs=self.rates.on_device,
        )  # fmt: skip

    def transfers(self, section: str, case: str, name: str, source: torch.Tensor) -> None:
        """To the host and back by the operators of a plan; variable-rate codecs also with half of the tail beyond what
        the copy is told to move."""
        codec = codec_by_name(name)
        trip = RoundTrip(codec, source)
        if not codec.fixed_rate:
            trip.site.is_encoding = True  # whatever it has decided: this measures the codec
            trip.site._limit_bytes = 1 << 60
        trip.to_host()
        trip.check()
        encode_ms = median_ms(trip.to_host)
        decode_ms = median_ms(trip.from_host)
        self._add(section, case, source, encode_ms, decode_ms, ratio=trip.size_bytes / trip.encoded_bytes)
        stream_ms = median_ms(trip.stream_to_host) / STREAM, median_ms(trip.stream_from_host) / STREAM
        trip.stream.clear()
        self._add(section, f"{case}, each of {STREAM} in a row", source, *stream_ms)
        if codec.fixed_rate:
            return
        head, site = trip.site.head_bytes, trip.site
        bound_bytes = head + (trip.encoded_bytes - head) // 32 * 16
        # Not a closure over `trip`: its slot's contents know the site, so the slot would never come back.
        site.bound_bytes = lambda: bound_bytes  # type: ignore[method-assign]
        missed_ms = median_ms(trip.to_host)
        trip.check()
        self._add(section, f"{case}, half of the tail beyond the bound", source, missed_ms, median_ms(trip.from_host))

    def _add(
        self, section: str, case: str, source: torch.Tensor, encode_ms: float, decode_ms: float, **more: float
    ) -> None:
        plain_bytes = source.numel() * source.dtype.itemsize
        to_host, from_host = plain_bytes / encode_ms / 1e6, plain_bytes / decode_ms / 1e6
        self.report.add(
            section, case, to_host_gbs=to_host, from_host_gbs=from_host, to_host_x=to_host / self.rates.to_host,
            from_host_x=from_host / self.rates.from_host, **more,
        )  # fmt: skip

    def zvc(self) -> None:
        for dtype, zeros in ((torch.float32, 0.6), (torch.float32, 0.8), (torch.float32, 0.9), (torch.bfloat16, 0.6)):
            source = random_tensor(self.size_bytes // dtype.itemsize, dtype, zeros)
            self.transfers("zvc", f"{dtype} {zeros:.0%} zeros".replace("torch.", ""), "zvc", source)

    def rectified(self) -> None:
        """Half zeros and no sign, as a rectifier leaves it."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            source = torch.relu(random_tensor(self.size_bytes // dtype.itemsize, dtype))
            for name in ("zvc", "zvc_exponent"):
                if name in codec_names():
                    self.transfers("rectified", f"{dtype} {name}".replace("torch.", ""), name, source)

    def alternatives(self) -> None:
        """CSR and RLE on the same tensors: does zvc mostly win?"""
        source = random_tensor(self.size_bytes // 4, torch.float32, 0.8)
        for name in ("csr", "rle"):
            if name in codec_names():
                self.transfers(name, "float32 80% zeros", name, source)

    def masks(self) -> None:
        self.transfers("bitpack", "bool", "bitpack", random_tensor(self.size_bytes, torch.bool))
        indices = random_tensor(self.size_bytes // 8, torch.int64)
        for name in ("narrow8", "narrow32"):
            self.transfers("narrow", f"int64 {name}", name, indices)

    def dense(self) -> None:
        activations = trained_activations()
        codec = codec_by_name("exponent")
        plain_bytes = observed = 0
        for tensor in activations.tensors:
            head = torch.empty(codec.worst_case_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8, device=DEVICE)
            codec.encode(tensor.view(-1), head)
            plain_bytes += 2 * tensor.numel()
            observed += codec.observed_bytes(head.cpu(), tensor.numel(), tensor.dtype)
        self.report.add(
            "exponent", f"{len(activations.tensors)} saved bf16 tensors after training", loss=activations.loss,
            ratio=plain_bytes / observed, plain_mib=plain_bytes >> 20,
        )  # fmt: skip
        self.keep_dense(activations.tensors)
        del activations
        self.transfers("exponent", "trained bf16", "exponent", self.dense_tensor)
        for dtype in (torch.float32, torch.float16):
            self.transfers(
                "exponent", f"normal {dtype}", "exponent", random_tensor(self.size_bytes // dtype.itemsize, dtype)
            )

    def keep_dense(self, tensors: Sequence[torch.Tensor]) -> None:
        # A storage of its own: whole storages are moved.
        self.dense_tensor = torch.cat([tensor.view(-1) for tensor in tensors])[: self.size_bytes // 2].clone()

    def lossy(self) -> None:
        source = random_tensor(self.size_bytes // 2, torch.bfloat16)
        for name in ("fp8_e4m3", "fp8_e5m2", "int8", "int4"):
            self.transfers("lossy", f"bf16 {name}", name, source)

    def on_device(self) -> None:
        """Share of the device-to-device copy rate, bytes read + written."""
        cases: list[tuple[str, torch.dtype, float]] = [
            ("zvc", torch.float32, 0.6), ("zvc", torch.bfloat16, 0.6), ("zvc", torch.bool, 0.5),
            ("bitpack", torch.bool, 0), ("narrow8", torch.int64, 0), ("narrow32", torch.int64, 0),
            ("zvc_exponent", torch.float32, 0.5), ("zvc_exponent", torch.bfloat16, 0.5),
            ("exponent", torch.bfloat16, 0), ("exponent", torch.float32, 0), ("exponent", torch.float16, 0),
            ("fp8_e4m3", torch.bfloat16, 0), ("fp8_e5m2", torch.bfloat16, 0), ("fp8_e4m3", torch.float32, 0),
            ("int8", torch.bfloat16, 0), ("int4", torch.bfloat16, 0), ("int4", torch.float32, 0),
            ("relu_mask", torch.float32, 0.5), ("relu_mask", torch.bfloat16, 0.5), ("relu6_mask", torch.bfloat16, 0),
        ]  # fmt: skip
        for name, dtype, zeros in cases:
            codec = codec_by_name(name)
            source = random_tensor(self.size_bytes // dtype.itemsize, dtype, zeros)
            target = torch.empty_like(source)
            encoded = torch.empty(codec.worst_case_bytes(source.numel(), dtype), dtype=torch.uint8, device=DEVICE)
            encode_ms = median_ms(lambda: codec.encode(source, encoded))  # noqa: B023  called before the loop moves on
            decode_ms = median_ms(lambda: codec.decode(encoded, target))  # noqa: B023  called before the loop moves on
            moved = self.size_bytes + codec.observed_bytes(encoded.cpu(), source.numel(), dtype)
            self.report.add(
                "on device", f"{name} {dtype}", encode_gbs=moved / encode_ms / 1e6, decode_gbs=moved / decode_ms / 1e6,
                encode_share=moved / encode_ms / 1e6 / self.rates.on_device,
                decode_share=moved / decode_ms / 1e6 / self.rates.on_device,
            )  # fmt: skip

    def geometry(self) -> None:
        """How many blocks a kernel needs."""
        self._sweep("zvc", random_tensor(self.size_bytes // 4, torch.float32, 0.6), (132, 264, 528, 1056, 2112, 4224))
        dense = random_tensor(self.size_bytes // 2, torch.bfloat16)
        self._sweep("exponent", dense, (264, 528, 1056, 2112, 4224))
        self._sweep("fp8_e4m3", dense, (528, 1056, 2112, 4224, 16896))

    def _sweep(self, name: str, source: torch.Tensor, blocks: tuple[int, ...]) -> None:
        codec = codec_by_name(name)
        target = torch.empty_like(source)
        encoded = torch.empty(
            codec.worst_case_bytes(source.numel(), source.dtype), dtype=torch.uint8, device=source.device
        )
        size_bytes = source.numel() * source.dtype.itemsize
        for threads in (256, 128):
            for count in blocks:
                for direction in ("encode", "decode"):
                    key = GeometryKey(name, direction, source.dtype.itemsize, size_class(size_bytes))
                    set_geometry(source.device.index or 0, key, Geometry(count, threads))
                encode_ms = median_ms(lambda: codec.encode(source, encoded), 3, 1)
                decode_ms = median_ms(lambda: codec.decode(encoded, target), 3, 1)
                self.report.add(
                    "geometry", f"{name} {count} x {threads}", encode_gbs=size_bytes / encode_ms / 1e6,
                    decode_gbs=size_bytes / decode_ms / 1e6,
                )  # fmt: skip
        clear_geometry()

    def host_overhead(self) -> None:
        """Host microseconds per call, without waiting for the device."""
        for row in host_cost():
            self.report.add("host overhead", **row)

    def slowdown(self) -> None:
        """How much longer matrix products and device copies take while a codec keeps running on another stream."""
        left = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
        plain = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
        copied = torch.empty_like(plain)

        def products() -> None:
            for _ in range(60):
                torch.mm(left, left)

        def copies() -> None:
            for _ in range(150):
                copied.copy_(plain)

        source = random_tensor(self.size_bytes // 4, torch.float32, 0.6)
        dense = random_tensor(self.size_bytes // 2, torch.bfloat16)
        target, part = torch.empty_like(source), self.host[: self.size_bytes]
        raw = target.view(torch.uint8)
        busy_ways: list[tuple[str, Callable[[], object]]] = [
            ("plain copy out", lambda: part.copy_(raw, non_blocking=True)),
            ("plain copy back", lambda: raw.copy_(part, non_blocking=True)),
        ]
        for name, tensor in (("zvc", source), ("exponent", dense), ("fp8_e4m3", dense)):
            trip = RoundTrip(codec_by_name(name), tensor)
            busy_ways += [(f"{name} encode", trip.to_host), (f"{name} decode", trip.from_host)]
        side = torch.cuda.Stream()
        for way, action in busy_ways:
            for work_name, work in (("matmul", products), ("copy", copies)):
                alone = median_ms(work, 3, 1)
                synchronize()
                with torch.cuda.stream(side):
                    for _ in range(16):
                        action()
                    still_busy = torch.cuda.Event()
                    still_busy.record()
                busy = median_ms_unsynchronised(work)
                covered = not still_busy.query()
                synchronize()
                self.report.add("slowdown", f"{way}, {work_name}", factor=busy / alone, alone_ms=alone, covered=covered)

    def autotune(self) -> None:
        """Bayesian search against trying everything: what each finds in how many trials; then the whole tuning."""
        timer = DeviceTimer(0, {4: torch.float32, 2: torch.bfloat16, 1: torch.bool})
        cases = [("zvc", 4), ("exponent", 2)]
        keys = [
            GeometryKey(name, direction, itemsize, size)
            for name, itemsize in cases
            for size in (24, 26)
            for direction in ("encode", "decode")
        ]
        for key in keys:
            for method in ("exhaustive", "bayesian"):
                start = time.perf_counter()
                geometry, result = search_geometry(key, timer, method=method)
                self.report.add(
                    "autotune", f"{key.codec} {key.direction} 2^{key.size_class} bytes: {method}",
                    best_us=result.best_cost * 1e6, kept=f"{geometry.blocks} x {geometry.threads}",
                    kept_us=timer(key, geometry) * 1e6, trials=len(result.costs), stopped_by=result.stopped_by,
                    seconds=time.perf_counter() - start,
                )  # fmt: skip
            clear_geometry()
        start = time.perf_counter()
        path = tune_codecs(torch.device("cuda", 0))
        self.report.add(
            "autotune", f"tune_codecs, {len(tuning_keys())} keys", seconds=time.perf_counter() - start, file=path.name
        )
        clear_geometry()

    def nvcomp(self) -> None:
        nvcomp: Any = importlib.import_module("nvidia.nvcomp")
        if not self.dense_tensor.numel():  # the section that makes it was not asked for
            self.keep_dense(trained_activations().tensors)

        tensors = {
            "float32 60% zeros": (random_tensor(self.size_bytes // 4, torch.float32, 0.6), "zvc"),
            "bool": (random_tensor(self.size_bytes, torch.bool), "bitpack"),
            "trained bf16": (self.dense_tensor, "exponent"),
        }
        for case, (tensor, ours) in tensors.items():
            codec = codec_by_name(ours)
            size_bytes = tensor.numel() * tensor.dtype.itemsize
            encoded = torch.empty(
                codec.worst_case_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8, device=DEVICE
            )
            target = torch.empty_like(tensor)
            encode_ms = median_ms(lambda: codec.encode(tensor, encoded))  # noqa: B023  called before the loop moves on
            decode_ms = median_ms(lambda: codec.decode(encoded, target))  # noqa: B023  called before the loop moves on
            observed = codec.observed_bytes(encoded.cpu(), tensor.numel(), tensor.dtype)
            self.report.add(
                "nvcomp", f"{case}: ours ({ours})", ratio=size_bytes / observed,
                encode_gbs=size_bytes / encode_ms / 1e6, decode_gbs=size_bytes / decode_ms / 1e6,
            )  # fmt: skip
            raw = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor.view(-1).view(torch.uint8)
            for algorithm, data_type in (("ANS", "|u1"), ("ANS", "<f2"), ("Bitcomp", "|u1"), ("Bitcomp", "<u2")):
                try:
                    theirs = nvcomp.Codec(algorithm=algorithm, data_type=data_type)
                    array = nvcomp.as_array(raw)
                    compressed = theirs.encode(array)
                    ratio = size_bytes / compressed.buffer_size
                    times = (
                        wall_ms(functools.partial(theirs.encode, array)),
                        wall_ms(functools.partial(theirs.decode, compressed)),
                    )
                    self.report.add(
                        "nvcomp", f"{case}: {algorithm} {data_type}", ratio=ratio,
                        encode_gbs=size_bytes / times[0] / 1e6, decode_gbs=size_bytes / times[1] / 1e6,
                    )  # fmt: skip
                except Exception as error:
                    self.report.add("nvcomp", f"{case}: {algorithm} {data_type}", error=repr(error)[:200])

    def large(self) -> None:
        """More than 2^31 elements: the last ones must survive."""
        numel = (1 << 31) + 4099
        mask = torch.zeros(numel, dtype=torch.bool, device=DEVICE)
        mask[-5000::3] = True
        codec = codec_by_name("bitpack")
        encoded = torch.empty(codec.encoded_bytes(numel, torch.bool), dtype=torch.uint8, device=DEVICE)
        target = torch.ones_like(mask)
        codec.encode(mask, encoded)
        codec.decode(encoded, target)
        assert torch.equal(mask, target)
        zvc = codec_by_name("zvc")
        encoded = torch.empty(zvc.worst_case_bytes(numel, torch.bool), dtype=torch.uint8, device=DEVICE)
        zvc.encode(mask, encoded)
        zvc.decode(encoded, target.fill_(True))
        assert torch.equal(mask, target)
        self.report.add("large", f"{numel} bools", ok=True)

    def corrupted(self) -> None:
        """A bad count is reported through the status flag."""
        codec = codec_by_name("zvc")
        source = random_tensor(100_000, torch.float32, 0.5)
        encoded = torch.empty(codec.worst_case_bytes(source.numel(), source.dtype), dtype=torch.uint8, device=DEVICE)
        codec.encode(source, encoded)
        encoded[128:132] = 0xFF
        codec.decode(encoded, source)
        synchronize()
        try:
            raise_if_corrupt()
        except ValueError as error:
            self.report.add("corrupted", "zvc count", reported=str(error)[:80])
            return
        raise AssertionError("a corrupted count went unnoticed")


def median_ms_unsynchronised(work: Callable[[], None]) -> float:
    """One timing by events, started at once: the device is meant to be busy."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def wall_ms(action: Callable[[], object], repeats: int = 5) -> float:
    """Median wall milliseconds of a call that may use streams of its own."""
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        action()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[repeats // 2]


def all_sections(bench: Bench) -> dict[str, Callable[[], None]]:
    """Section name -> what runs it."""

    def correctness() -> None:
        for name in codec_names():
            for dtype in codec_by_name(name).dtypes:
                if dtype in (*FLOATS, torch.bool, torch.int64):
                    bench.report.section(
                        f"correct {name} {dtype}",
                        lambda: check_codec(name, dtype, bench.report),  # noqa: B023  called at once
                    )

    return {
        "compile": compile_all, "plain": bench.plain, "correctness": correctness, "zvc": bench.zvc,
        "rectified": bench.rectified, "masks": bench.masks, "dense": bench.dense, "lossy": bench.lossy,
        "on_device": bench.on_device, "alternatives": bench.alternatives, "host_overhead": bench.host_overhead,
        "slowdown": bench.slowdown, "geometry": bench.geometry, "autotune": bench.autotune, "nvcomp": bench.nvcomp,
        "large": bench.large, "corrupted": bench.corrupted,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=None, help="names of sections to run")
    arguments = parser.parse_args()
    started = time.perf_counter()
    report = Report()
    sections = all_sections(Bench(report, arguments.size_mib << 20))
    for name, body in sections.items():
        if arguments.only is None or name in (*arguments.only, "compile", "plain"):
            report.section(name, body)
    facts = {**environment(), "seconds": f"{time.perf_counter() - started:.0f}"}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "codecs.md").write_text(as_markdown(report, facts))
    (arguments.out / "codecs.json").write_text(json.dumps({"facts": facts, "rows": report.rows}, indent=1))
    print(json.dumps(facts), flush=True)
    print("FAILED: " + "; ".join(report.failures) if report.failures else "all sections passed", flush=True)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
