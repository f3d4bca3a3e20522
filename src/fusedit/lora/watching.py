"""Watches one session's calls for LoRAs that changed, however that was done, and has them verified.

A step pays for two comparisons. What is active is looked at once a run of the pipeline, and where a forward made a term
of other matrices than before, as after a change in the middle of a run.
"""

from __future__ import annotations

import torch
from torch import nn

from fusedit.lora.verifier import Stamp, adapted, stamp_of, verify
from fusedit.runtime.hoist import Run
from fusedit.runtime.terms import Terms


class Watcher:
    """What one session knows to be verified.

    Args:
        module: with e4m3 weights.
        terms: of the session's model.
    """

    def __init__(self, module: nn.Module, terms: Terms) -> None:
        self.module, self.terms = module, terms
        self._run: Run | None = None
        self._changes = -1
        self._stamp: Stamp | None = None

    def look(self, run: Run | None, x: torch.Tensor) -> None:
        """After a call.

        Args:
            run: the pipeline's.
            x: any input of the call, for where it was computed.

        Raises:
            LoraError: a layer does something else than its LoRAs' matrices say.
        """
        if run is not None and self._run is not None and self._run.goes_on(run) and self._changes == self.terms.changes:
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # the next call looks
        self._run = None  # where this raises, the next call looks again
        layers = adapted(self.module)
        stamp = stamp_of(layers)
        same = self._stamp is not None and self._stamp.same(stamp) and self._changes == self.terms.changes
        if same or verify(self.module, layers, stamp, self.terms, x.device):
            self._stamp = stamp
        self._run, self._changes = run, self.terms.changes
