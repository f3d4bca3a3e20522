"""Settings for the whole suite."""

from __future__ import annotations

import gc
import os

import torch

# The models here are tiny: a second thread costs more in waiting than it brings, many times more on a busy machine.
# The processes that tests start read it from the environment: three runs of `fusedit layout` on a busy machine of two
# cores took 81 CPU seconds without it, 35 with it, nearly all of them for imports.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
gc.disable()  # until the tests begin: importing diffusers with its neighbours takes 5.3 CPU seconds, not 7.8


def pytest_collection_finish() -> None:
    """What imports and collection made is there to stay: garbage is looked for among what tests make alone.

    A look at everything takes 0.3 CPU seconds, and drawing a picture and finding what was freed ask for many.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """So that libraries see their own objects freed, and do not warn of leaks."""
    gc.enable()
    gc.unfreeze()
