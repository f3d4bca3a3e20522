"""Fidelity: what an acceleration did to the picture, measured and judged."""

from __future__ import annotations

from fusedit.quality._compare import compare
from fusedit.quality.gates import Gates, Verdict
from fusedit.quality.metrics import Metrics, measure
from fusedit.quality.result import Comparison, Pair

__all__ = ["Comparison", "Gates", "Metrics", "Pair", "Verdict", "compare", "measure"]
