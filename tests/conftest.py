"""Settings for the whole suite."""

from __future__ import annotations

import torch

# The models here are tiny: a second thread costs more in waiting than it brings, many times more on a busy machine.
torch.set_num_threads(1)
