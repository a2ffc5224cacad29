"""Headings of the help, under which options stand."""

from __future__ import annotations

BASELINES = "Baselines"
LAYOUT = "Layout"
WHAT = "What to train"
WHERE = "On what"
AIM = "Objective"
FAILURES = "Failures"
PINS = "Pins"
SEARCH = "Search"
OUTPUT = "Output"
