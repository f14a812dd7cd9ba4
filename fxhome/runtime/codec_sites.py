"""What the data-dependent codecs turned out to save, and what was decided from it, while the training runs.

A site is one swapped storage of one graph. Before each step it says whether to encode or to copy plainly: into the same
slot, which is large enough for both, so changing one's mind needs no new plan. Sizes are read from counts that have
already arrived in host memory; the device is never waited for.
"""

from __future__ import annotations

import dataclasses
import threading

# Encoding goes on while it takes at most this share of the plain copy's time; then one step in so many tries again.
BREAK_EVEN = 0.95
RETRY_STEPS = 50


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """One site as users see it. Ratios are plain bytes / encoded bytes; None before anything was seen."""

    site: str
    codec: str
    plain_bytes: int
    ratio_assumed: float
    ratio_seen: float | None
    is_encoding: bool
    decisions_changed: int
    steps: int


class CodecSite:
    """The state of one site. `link_efficiency`: speed of a transfer that encodes, relative to a plain one, per byte."""

    def __init__(self, site: str, codec: str, plain_bytes: int, assumed_bytes: int, link_efficiency: float) -> None:
        self.site = site
        self.codec = codec
        self.plain_bytes = plain_bytes
        self.assumed_bytes = assumed_bytes
        self.seen_bytes: int | None = None
        self.is_encoding = True
        self.decisions_changed = 0
        self.steps = 0
        self.steps_since_seen = 0
        self._plain_steps = 0
        self._limit_bytes = plain_bytes * BREAK_EVEN * link_efficiency

    def next_step(self) -> bool:
        """Count a step; whether to encode in it. While plain copies win, an attempt now and then looks again."""
        self.steps += 1
        self.steps_since_seen += 1
        if self.is_encoding:
            return True
        self._plain_steps += 1
        return self._plain_steps % RETRY_STEPS == 0

    def observe(self, encoded_bytes: int) -> None:
        """Take note of a size and decide what the next steps do."""
        self.seen_bytes = encoded_bytes
        self.steps_since_seen = 0
        pays = encoded_bytes <= self._limit_bytes
        if pays != self.is_encoding:
            self.is_encoding = pays
            self.decisions_changed += 1
            self._plain_steps = 0

    def report(self) -> SiteReport:
        """A snapshot."""
        return SiteReport(
            site=self.site,
            codec=self.codec,
            plain_bytes=self.plain_bytes,
            ratio_assumed=self.plain_bytes / max(1, self.assumed_bytes),
            ratio_seen=None if self.seen_bytes is None else self.plain_bytes / max(1, self.seen_bytes),
            is_encoding=self.is_encoding,
            decisions_changed=self.decisions_changed,
            steps=self.steps,
        )


_sites: dict[str, CodecSite] = {}
_lock = threading.Lock()


def site_of(site: str, codec: str, plain_bytes: int, assumed_bytes: int, link_efficiency: float) -> CodecSite:
    """The site of that name; made anew where it is unknown or stands for another codec or size by now."""
    found = _sites.get(site)
    if found is None or found.codec != codec or found.plain_bytes != plain_bytes:
        with _lock:
            found = _sites[site] = CodecSite(site, codec, plain_bytes, assumed_bytes, link_efficiency)
    return found


def site_name(graph_fingerprint: str, storage: str) -> str:
    """The name under which a storage of a graph is known here."""
    return f"{graph_fingerprint}/{storage}"


def reports(graph_fingerprint: str = "") -> tuple[SiteReport, ...]:
    """Snapshots of a graph's sites, or of all, in order of their first use."""
    return tuple(site.report() for name, site in list(_sites.items()) if name.startswith(graph_fingerprint))


def observed_bytes(graph_fingerprint: str) -> dict[str, int]:
    """Encoded bytes seen, by storage name: what the next plan of this graph assumes."""
    prefix = site_name(graph_fingerprint, "")
    seen = (
        (name.removeprefix(prefix), site.seen_bytes) for name, site in list(_sites.items()) if name.startswith(prefix)
    )
    return {name: size for name, size in seen if size is not None}


def notes(graph_fingerprint: str) -> tuple[str, ...]:
    """What was seen, in words, for the notes of a plan: one line per codec, none where nothing was compressed."""
    by_codec: dict[str, list[SiteReport]] = {}
    for report in reports(site_name(graph_fingerprint, "")):
        if report.ratio_seen is not None:
            by_codec.setdefault(report.codec, []).append(report)
    lines = []
    for codec, found in by_codec.items():
        plain = sum(report.plain_bytes for report in found)
        seen = plain / sum(report.plain_bytes / (report.ratio_seen or 1.0) for report in found)
        assumed = plain / sum(report.plain_bytes / report.ratio_assumed for report in found)
        changed = sum(report.decisions_changed for report in found)
        off = sum(not report.is_encoding for report in found)
        lines.append(
            f"{codec} on its way to the host: ratio seen {seen:.2f}, assumed {assumed:.2f}, over {len(found)} tensors; "
            f"decisions changed {changed}, copied plainly now {off}"
        )
    return tuple(lines)


def clear() -> None:
    """Forget everything (for tests)."""
    with _lock:
        _sites.clear()
