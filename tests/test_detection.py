"""The table of what statistics of precision detect can be made: its kernels, and how it counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks" / "studies"))

import detection
import precision_rows
from precision_layers import layer_lines


def line_named(name, lines):
    (found,) = (line for line in lines if line.name == name)
    return found


def test_right_kernels_are_told_from_wrong_ones():
    lines = list(precision_rows.float32_lines())
    right = detection.measure(line_named("layer_norm, torch, mu/sigma = 0", lines), 0)
    wrong = detection.measure(line_named("layer_norm, variance over n - 1, n = 512", lines), 0)
    assert not any(right.found) and all(wrong.found)


def test_an_infinite_error_is_detected_by_every_statistic():
    line = line_named("attention, no maximum subtracted, large logits", precision_rows.float32_lines())
    assert all(detection.measure(line, 0).found)


def test_a_row_says_how_often_it_was_detected_and_how_often_it_should_be(monkeypatch):
    monkeypatch.setattr(detection, "SEEDS", 2)
    text, good = detection.row(line_named("gelu, torch, amplitude 0.1", precision_rows.float32_lines()))
    assert good and text.startswith("| **right** gelu, torch, amplitude 0.1 | 0 | 0 | 0 | 0 | 0 |")
    _, good = detection.row(line_named("gelu, tanh for erf, amplitude 0.1", precision_rows.float32_lines()))
    assert not good  # eight of eight cannot be had of two seeds


def test_names_are_unique_and_every_fault_states_a_demand():
    for _, lines in detection.TABLES:
        names = [line.name for line in lines()]
        assert len(names) == len(set(names)) >= 6
    assert [line.demanded for line in layer_lines()] == [None, 8, 8, 8, 8, 4]
