"""Processes that measure one device take turns."""

import fcntl
from pathlib import Path

import pytest
import torch

from fxhome.device import measuring_turn


def test_a_turn_is_exclusive_and_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))
    with measuring_turn(torch.device("cpu")):
        (path,) = tmp_path.glob("measuring-*.lock")
        with path.open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_a_place_for_the_lock_measuring_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path / "file" / "below"))
    with measuring_turn(torch.device("cpu")):
        pass
    assert "cannot be locked" in caplog.text
