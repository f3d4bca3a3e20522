"""The tensors of one layer as a low-rank pair: LoRA as it is, LoKr and LoHa exactly.

    LoRA  delta = B A                       [N, R] [R, K]
    LoKr  delta = W1 (x) W2                 each whole or a product U V;  (U1 V1) (x) (U2 V2) = (U1 (x) U2) (V1 (x) V2)
    LoHa  delta = (U1 V1) * (U2 V2)         row n of B: U1[n] (x) U2[n];  column k of A: V1[:, k] (x) V2[:, k]

Both products have rank r1 r2. Where that is no less than min(N, K), the dense delta beside an identity is smaller and
as exact. Products are made and kept in fp32: they have more bits than the file's bf16 factors. Formulas as in LyCORIS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fusedit.errors import LoraError
from fusedit.lora.layers import LoraLayer

_BYTES: Final = 4
"""Of one fp32 number."""


class Pair(NamedTuple):
    """A matrix as the product of `left` [a, r] and `right` [r, b]."""

    left: Tensor
    right: Tensor


Parts = Mapping[str, Tensor]
"""Role -> tensor of one layer."""


def build(name: str, parts: Parts) -> LoraLayer | None:
    """The layer that these tensors make, without its alpha's and magnitude's meaning for others; None: they make none.

    Raises:
        LoraError: a factor is missing, or shapes do not fit.
    """
    if any(role.startswith("lokr_") for role in parts):
        return _product(*_kron_sides(name, parts), parts, hadamard=False)
    if any(role.startswith("hada_") for role in parts):
        return _product(*_hada_sides(name, parts), parts, hadamard=True)
    if "diff" in parts and parts["diff"].ndim > 1:
        return _dense(matrix(name, parts["diff"]).float(), None)
    if "down" not in parts and "up" not in parts:
        return None
    down, up = (matrix(name, _need(name, parts, role)) for role in ("down", "up"))
    if down.shape[0] != up.shape[1]:
        raise LoraError(
            f"layer {name!r} has a down matrix of rank {down.shape[0]} and an up matrix of rank {up.shape[1]}; the "
            "file is damaged, download it again"
        )
    return LoraLayer(down, up, _alpha(parts))


def size(name: str, parts: Parts) -> int:
    """Bytes that `build` makes anew: 0 for a plain LoRA, whose tensors are used as they are."""
    if any(role.startswith("lokr_") for role in parts):
        one, two = _kron_sides(name, parts)
        outputs, inputs = one.left.shape[0] * two.left.shape[0], one.right.shape[1] * two.right.shape[1]
    elif any(role.startswith("hada_") for role in parts):
        one, two = _hada_sides(name, parts)
        outputs, inputs = one.left.shape[0], one.right.shape[1]
    else:
        return 0
    rank = min(one.left.shape[1] * two.left.shape[1], outputs, inputs)
    return rank * (outputs + inputs) * _BYTES


def matrix(name: str, tensor: Tensor) -> Tensor:
    """A two-dimensional tensor, also from the kernel of a 1x1 convolution.

    Raises:
        LoraError: a convolution of another size, or no matrix, or an empty one.
    """
    if tensor.ndim == 4 and tensor.shape[2:] == (1, 1):
        tensor = tensor[:, :, 0, 0]
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise LoraError(
            f"layer {name!r} holds a tensor of shape {tuple(tensor.shape)}; FLUX and Z-Image have linear layers, so "
            "give a LoRA with matrices [rank, inputs] and [outputs, rank]"
        )
    return tensor


def _kron_sides(name: str, parts: Parts) -> tuple[Pair, Pair]:
    return _kron_side(name, parts, "w1"), _kron_side(name, parts, "w2")


def _kron_side(name: str, parts: Parts, side: str) -> Pair:
    """One factor of a LoKr: whole (then the smaller side is an identity), a product, or a product around a core."""
    if (whole := parts.get(f"lokr_{side}")) is not None:
        return _whole(matrix(name, whole).float())
    return _factored(name, parts, f"lokr_{side}_a", f"lokr_{side}_b", "lokr_t2" if side == "w2" else None)


def _hada_sides(name: str, parts: Parts) -> tuple[Pair, Pair]:
    one = _factored(name, parts, "hada_w1_a", "hada_w1_b", "hada_t1")
    two = _factored(name, parts, "hada_w2_a", "hada_w2_b", "hada_t2")
    if (one.left.shape[0], one.right.shape[1]) != (two.left.shape[0], two.right.shape[1]):
        raise LoraError(
            f"layer {name!r} multiplies a matrix of {one.left.shape[0]} x {one.right.shape[1]} with one of "
            f"{two.left.shape[0]} x {two.right.shape[1]}; the file is damaged, download it again"
        )
    return one, two


def _factored(name: str, parts: Parts, a: str, b: str, core: str | None) -> Pair:
    left, right = matrix(name, _need(name, parts, a)).float(), matrix(name, _need(name, parts, b)).float()
    if core is not None and core in parts:  # then a is stored [r, outputs]
        middle = matrix(name, parts[core]).float()
        if (left.shape[0], right.shape[0]) != tuple(middle.shape):
            raise _apart(name, a, left, b, right)
        return Pair(left.T, middle @ right)
    if left.shape[1] != right.shape[0]:
        raise _apart(name, a, left, b, right)
    return Pair(left, right)


def _whole(full: Tensor) -> Pair:
    """A matrix as a pair of its smaller side's rank."""
    rows, columns = full.shape
    if rows < columns:
        return Pair(torch.eye(rows), full)
    return Pair(full, torch.eye(columns))


def _product(one: Pair, two: Pair, parts: Parts, *, hadamard: bool) -> LoraLayer:
    scale = _scale(parts, "hada" if hadamard else "lokr")
    if hadamard:
        outputs, inputs = one.left.shape[0], one.right.shape[1]
    else:
        outputs, inputs = one.left.shape[0] * two.left.shape[0], one.right.shape[1] * two.right.shape[1]
    rank = one.left.shape[1] * two.left.shape[1]
    if rank >= min(outputs, inputs):
        first, second = one.left @ one.right, two.left @ two.right
        return _dense(first * second if hadamard else torch.kron(first, second), scale)
    if hadamard:
        up = (one.left[:, :, None] * two.left[:, None, :]).reshape(outputs, rank)
        down = (one.right[:, None, :] * two.right[None, :, :]).reshape(rank, inputs)
    else:
        up, down = torch.kron(one.left, two.left), torch.kron(one.right, two.right)
    return LoraLayer(down.contiguous(), up.contiguous(), None if scale is None else scale * rank)


def _dense(change: Tensor, scale: float | None) -> LoraLayer:
    """Any change as a pair: itself and an identity on its smaller side."""
    pair = _whole(change)
    return LoraLayer(pair.right, pair.left, None if scale is None else scale * pair.right.shape[0])


def _scale(parts: Parts, kind: str) -> float | None:
    """alpha / rank of a LoKr or LoHa; without a factored side the alpha means nothing, as in LyCORIS."""
    alpha = _alpha(parts)
    for side in ("w2_b", "w1_b"):
        if alpha is not None and (factor := parts.get(f"{kind}_{side}")) is not None:
            return alpha / factor.shape[0]
    return None


def _alpha(parts: Parts) -> float | None:
    return None if "alpha" not in parts else float(parts["alpha"].double().reshape(()))


def _need(name: str, parts: Parts, role: str) -> Tensor:
    if (found := parts.get(role)) is not None:
        return found
    others = ", ".join(sorted(parts))
    raise LoraError(f"layer {name!r} has no {role} beside its {others}; the file is incomplete, download it again")


def _apart(name: str, a: str, left: Tensor, b: str, right: Tensor) -> LoraError:
    return LoraError(
        f"layer {name!r} has {a} of shape {tuple(left.shape)} and {b} of shape {tuple(right.shape)}, which do not "
        "multiply; the file is damaged, download it again"
    )
