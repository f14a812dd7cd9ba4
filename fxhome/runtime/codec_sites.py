"""What the data-dependent codecs turned out to save, and what was decided from it, while the training runs.

A site is one swapped storage of one graph. Before each step it says whether to encode or to copy plainly: into the same
buffers, which are large enough for both, so changing one's mind needs no new plan. The device leaves the size in a
page-locked word of the site; the host reads that of the last step that has got so far, and waits for nothing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from typing import NamedTuple

import torch

from fxhome.cuda_kernels.layout import VECTOR_BYTES

# Encoding goes on while the copy moves at most this share of the plain bytes; then one step in so many tries again.
BREAK_EVEN = 0.93
RETRY_STEPS = 50
# A copy is told to move the last size seen, so much more, and what sizes have risen by of late: at first, and at most,
# this part of the tail. What lies beyond is moved at the link's rate too, only not by a copy engine.
MARGIN_BYTES = 4096
MARGIN_SHARE = 64
_BOARD_WORDS = 4096


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


class Note(NamedTuple):
    """A word of a board: its address and a view that the host reads."""

    address: int
    word: ctypes.c_uint32


class _Board:
    """Words of the host that a device writes and the host reads, `taken` of them given out; page-locked if `pinned`.

    Page-locked ones are a tensor's. Those of a CPU are not: it would be counted as the device's memory there.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._words = (
            torch.zeros(_BOARD_WORDS, dtype=torch.int32, pin_memory=True)
            if pinned
            else (ctypes.c_uint32 * _BOARD_WORDS)()
        )
        self.address = (
            self._words.data_ptr() if isinstance(self._words, torch.Tensor) else ctypes.addressof(self._words)
        )
        self.taken = 0


class CodecSite:
    """The state of one site.

    head_bytes: of the encoded form. note: where the device leaves how many vectors of the tail are in use, plus one; 0
    until it has done so for the first time.
    """

    def __init__(
        self, site: str, codec: str, plain_bytes: int, assumed_bytes: int, head_bytes: int = 0, note: Note | None = None
    ) -> None:
        self.site = site
        self.codec = codec
        self.plain_bytes = plain_bytes
        self.assumed_bytes = assumed_bytes
        self.seen_bytes: int | None = None
        self.is_encoding = True
        self.decisions_changed = 0
        self.steps = 0
        self.head_bytes = head_bytes
        self.note = note or Note(0, ctypes.c_uint32())
        self._plain_steps = 0
        self._limit_bytes = plain_bytes * BREAK_EVEN
        self._tail_bytes = 0
        self._rise_share = 1 / MARGIN_SHARE

    def next_step(self) -> bool:
        """Count a step; whether to encode in it. While plain copies win, an attempt now and then looks again."""
        self.look()
        if (tail_bytes := self._noted_tail_bytes()) is not None:
            self._note_rise(tail_bytes)
        self.steps += 1
        if self.is_encoding:
            return True
        self._plain_steps += 1
        return self._plain_steps % RETRY_STEPS == 0

    def look(self) -> None:
        """Read what has been noted by now."""
        if (tail_bytes := self._noted_tail_bytes()) is not None:
            self.observe(self.head_bytes + tail_bytes)

    def bound_bytes(self) -> int:
        """What the next encoded form is likely not to exceed, a multiple of 16; 0 where nothing is known yet."""
        tail_bytes = self._noted_tail_bytes()
        if tail_bytes is None:
            return 0
        rise_bytes = round(tail_bytes * self._rise_share) // VECTOR_BYTES * VECTOR_BYTES
        return self.head_bytes + tail_bytes + MARGIN_BYTES + rise_bytes

    def _noted_tail_bytes(self) -> int | None:
        """The tail that the latest encoding has noted; None where none has."""
        found = self.note.word.value
        return VECTOR_BYTES * (found - 1) if found else None

    def _note_rise(self, tail_bytes: int) -> None:
        """Remember the largest rise of late as a share; every step halves what is remembered."""
        seen = max(0, tail_bytes - self._tail_bytes) / self._tail_bytes if self._tail_bytes else 0.0
        self._rise_share = min(max(seen, self._rise_share / 2), 1 / MARGIN_SHARE)
        self._tail_bytes = tail_bytes

    def observe(self, encoded_bytes: int) -> None:
        """Take note of a size and decide what the next steps do."""
        self.seen_bytes = encoded_bytes
        pays = encoded_bytes <= self._limit_bytes
        if pays != self.is_encoding:
            self.is_encoding = pays
            self.decisions_changed += 1
            self._plain_steps = 0

    def report(self) -> SiteReport:
        """A snapshot."""
        self.look()
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
_boards: dict[bool, list[_Board]] = {False: [], True: []}
_lock = threading.Lock()


def site_of(site: str, codec: str, plain_bytes: int) -> CodecSite | None:
    """The site of that name; None where it is unknown or stands for another codec or size by now."""
    found = _sites.get(site)
    return None if found is None or found.codec != codec or found.plain_bytes != plain_bytes else found


def add_site(
    site: str, codec: str, plain_bytes: int, assumed_bytes: int, head_bytes: int = 0, *, pinned: bool = False
) -> CodecSite:
    """Make the site of that name anew. pinned: its note is written by a device."""
    with _lock:
        made = CodecSite(site, codec, plain_bytes, assumed_bytes, head_bytes, _new_note(pinned))
        _sites[site] = made
    return made


def _new_note(pinned: bool) -> Note:
    """A fresh word of a board. Boards are never freed: a kernel of a forgotten site may still write there."""
    boards = _boards[pinned]
    if not boards or boards[-1].taken == _BOARD_WORDS:
        boards.append(_Board(pinned=pinned))
    board = boards[-1]
    address = board.address + 4 * board.taken
    board.taken += 1
    return Note(address, ctypes.c_uint32.from_address(address))


def site_name(graph_fingerprint: str, storage: str) -> str:
    """The name under which a storage of a graph is known here."""
    return f"{graph_fingerprint}/{storage}"


def reports(graph_fingerprint: str = "") -> tuple[SiteReport, ...]:
    """Snapshots of a graph's sites, or of all, in order of their first use."""
    return tuple(site.report() for name, site in list(_sites.items()) if name.startswith(graph_fingerprint))


def observed_bytes(graph_fingerprint: str) -> dict[str, int]:
    """Encoded bytes seen, by storage name: what the next plan of this graph assumes."""
    prefix = site_name(graph_fingerprint, "")
    reports(prefix)  # looks at what has arrived since
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
