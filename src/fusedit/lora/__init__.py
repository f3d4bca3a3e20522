"""LoRAs: the key formats of their files, read into layers of a diffusers transformer; their life on a pipeline."""

from __future__ import annotations

from fusedit.lora.inspection import inspect
from fusedit.lora.layers import LoraFile, LoraLayer
from fusedit.lora.matching import Match, check
from fusedit.lora.parsing import parse, read
from fusedit.lora.tensors import read_tensors

__all__ = ["LoraFile", "LoraLayer", "Match", "check", "inspect", "parse", "read", "read_tensors"]
