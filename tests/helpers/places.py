"""Folders of the project that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
HELPERS, GPU_STAND_IN = TESTS / "helpers", TESTS / "gpu_stand_in"
GOLDEN = TESTS / "golden"
"""Golden numbers by kind of head, which ``scripts/golden/`` makes."""
