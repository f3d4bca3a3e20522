"""Settings for the whole suite."""

from __future__ import annotations

import os

import torch

# The models here are tiny: a second thread costs more in waiting than it brings, many times more on a busy machine.
# The processes that tests start read it from the environment: three runs of `fusedit layout` on a busy machine of two
# cores took 81 CPU seconds without it, 35 with it, nearly all of them for imports.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
