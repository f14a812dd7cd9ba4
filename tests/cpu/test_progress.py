"""Progress bars: on stderr only, and only for those who see or asked for them."""

from __future__ import annotations

import pytest

from fxhome.progress import announce, progress, progress_shown


def work(total: int | None = 2) -> None:
    with progress("timing ops", total=total) as advance:
        advance()
        advance(1)


def test_silent_where_stderr_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    work()

    assert capfd.readouterr() == ("", "")


def test_shown_on_stderr_when_asked(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_shown(True):
        work()

    out, err = capfd.readouterr()
    assert out == ""
    assert "timing ops" in err


def test_silenced_on_a_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_shown(False):
        work()

    assert capfd.readouterr() == ("", "")


def test_a_bar_inside_a_bar(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_shown(True), progress("searching") as advance:
        work()
        advance(3)

    err = capfd.readouterr().err
    assert "searching" in err
    assert "timing ops" in err


def test_where_it_is_no_terminal_the_start_is_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    """A bar in a file is written when it ends: whoever follows the file must see what is going on now."""
    with progress_shown(True), progress("searching"):
        assert "searching ..." in capfd.readouterr().err
        with progress("timing ops", total=2):
            assert "timing ops ..." in capfd.readouterr().err


def test_an_announcement_follows_the_same_wish(capfd: pytest.CaptureFixture[str]) -> None:
    announce("a long compilation begins")
    assert capfd.readouterr() == ("", "")
    with progress_shown(True):
        announce("a long compilation begins")
        assert capfd.readouterr() == ("", "a long compilation begins\n")
        with progress("searching"):
            announce("and goes on")
    assert "and goes on" in capfd.readouterr().err


def test_the_next_bar_starts_afresh_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_shown(True):
        with pytest.raises(RuntimeError, match="inside"), progress("first"):
            raise RuntimeError("inside")
        capfd.readouterr()
        work()

    assert "timing ops" in capfd.readouterr().err
