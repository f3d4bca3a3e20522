"""One optimizer for bf16 weights with fp32 masters: Muon on hidden matrices, AdamW on the rest, and an average (EMA).

Everything stays on the device, so that a whole training step can be one CUDA graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's quintic


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrices of a stack [N, R, C], by a Newton-Schulz iteration in bf16."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class MasterOptimizer:
    """Updates MODULE's weights from gradients given in the order of `self.weights`."""

    def __init__(
        self,
        module: nn.Module,
        muon_names: frozenset[str],
        *,
        muon_lr: float = 0.0,
        adam_lr: float,
        average: float = 0.999,
        clip: float = 1.0,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        named = [(n, p) for n, p in module.named_parameters() if n not in frozen]
        self.names = [n for n, _ in named]
        self.weights: list[torch.Tensor] = [p for _, p in named]
        self.masters = [p.detach().float().clone() for p in self.weights]
        self.averages = [m.clone() for m in self.masters]
        self.first = [torch.zeros_like(m) for m in self.masters]
        self.adam = [i for i, n in enumerate(self.names) if n not in muon_names]
        self.second = [torch.zeros_like(self.masters[i]) for i in self.adam]
        self.stacks: dict[torch.Size, list[int]] = defaultdict(list)
        for i, n in enumerate(self.names):
            if n in muon_names:
                self.stacks[self.masters[i].shape].append(i)
        device = self.masters[0].device
        self.rate = torch.zeros((), device=device)  # the schedule's factor, set before each step
        self.count = torch.zeros((), device=device)
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.average, self.clip = average, clip

    @torch.no_grad()
    def step(self, grads: Sequence[torch.Tensor]) -> None:
        """Apply one update."""
        grads = [g.float() for g in grads]
        self.count += 1
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        self._adam([grads[i] for i in self.adam])
        for members in self.stacks.values():
            self._muon(members, [grads[i] for i in members])
        torch._foreach_copy_(self.weights, self.masters)
        # The average forgets fast in the beginning, so that it is of use early.
        keep = torch.minimum((1 + self.count) / (10 + self.count), torch.full_like(self.count, self.average))
        difference = torch._foreach_sub(self.masters, self.averages)
        torch._foreach_mul_(difference, 1 - keep)
        torch._foreach_add_(self.averages, difference)

    def _adam(self, grads: list[torch.Tensor], beta1: float = 0.9, beta2: float = 0.98) -> None:
        masters = [self.masters[i] for i in self.adam]
        first = [self.first[i] for i in self.adam]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, grads, grads, value=1 - beta2)
        denominator = torch._foreach_sqrt(self.second)
        torch._foreach_div_(denominator, torch.sqrt(1 - beta2**self.count))
        torch._foreach_add_(denominator, 1e-8)
        update = torch._foreach_div(first, denominator)
        torch._foreach_mul_(update, self.adam_lr * self.rate / (1 - beta1**self.count))
        torch._foreach_sub_(masters, update)

    def _muon(self, members: list[int], grads: list[torch.Tensor], momentum: float = 0.95) -> None:
        masters = [self.masters[i] for i in members]
        first = [self.first[i] for i in members]
        torch._foreach_lerp_(first, grads, 1 - momentum)
        nesterov = torch._foreach_lerp(grads, first, momentum)
        rows, columns = masters[0].shape
        update = orthogonalise(torch.stack(nesterov)).float() * max(1.0, rows / columns) ** 0.5
        torch._foreach_sub_(masters, list((update * (self.muon_lr * self.rate)).unbind()))

    def state(self) -> dict[str, torch.Tensor]:
        """Return the current weights by name."""
        return dict(zip(self.names, self.masters, strict=True))

    def average_state(self) -> dict[str, torch.Tensor]:
        """Return the averaged weights by name."""
        return dict(zip(self.names, self.averages, strict=True))

    def load(self, masters: dict[str, torch.Tensor], averages: dict[str, torch.Tensor]) -> None:
        """Take up weights and averages; the moments start anew."""
        for name, master, average in zip(self.names, self.masters, self.averages, strict=True):
            master.copy_(masters[name])
            average.copy_(averages[name])
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
