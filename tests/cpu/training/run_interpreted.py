"""Run by a test in a process of its own: the training kernels in Triton's interpreter beside plain autograd."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.interpreter import patch_once
from support.training_kernels import CASES, wrong

if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    patch_once()
    print(json.dumps({case.name: wrong(case, "cpu", torch.float32) for case in CASES}))
