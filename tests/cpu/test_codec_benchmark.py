"""The codec benchmark's sections run: on a CPU, with the references and tiny sizes."""

from __future__ import annotations

import pytest
import torch

from benchmarks import codecs
from benchmarks.codec_data import Activations
from benchmarks.codec_report import Report, as_markdown, environment
from benchmarks.codec_timing import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU the benchmark itself is run")


@pytest.mark.parametrize(
    ("section", "rows"),
    [("plain", 1), ("zvc", 12), ("rectified", 18), ("masks", 6), ("dense", 10), ("lossy", 8), ("alternatives", 6)],
)
def test_a_section_reports_every_case(section: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def activations() -> Activations:
        return Activations([torch.randn(1 << 14).bfloat16() for _ in range(3)], 1.0)

    monkeypatch.setattr(codecs, "trained_activations", activations)
    report = Report()
    bench = codecs.Bench(report, 1 << 15)

    report.section(section, codecs.all_sections(bench)[section])

    assert report.failures == []
    assert len(report.rows) == rows
    assert f"## {report.rows[0]['section']}" in as_markdown(report, environment())


def test_rates_on_the_device_are_reported_for_every_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    bench = codecs.Bench(report, 1 << 15)

    report.section("on_device", bench.on_device)

    assert report.failures == []
    assert {str(row["case"]).split()[0] for row in report.rows} >= {"zvc", "zvc_exponent", "exponent", "int8", "int4"}


def test_a_section_that_fails_says_so() -> None:
    report = Report()

    report.section("broken", lambda: [][0])

    assert report.failures == ["broken: IndexError: list index out of range"]
