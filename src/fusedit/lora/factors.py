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


class Product(NamedTuple):
    """A change made of two matrices, each a pair: their Kronecker product, or their elementwise one."""

    one: Pair
    two: Pair
    elementwise: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.one.left.shape[0], self.one.right.shape[1]
        if self.elementwise:
            return rows, columns
        return rows * self.two.left.shape[0], columns * self.two.right.shape[1]

    @property
    def rank(self) -> int:
        """Of the pair that it becomes: as it follows from the factors, or that of the whole matrix if that is less."""
        return min(self.one.left.shape[1] * self.two.left.shape[1], *self.shape)


def build(name: str, parts: Parts) -> LoraLayer | None:
    """The layer that these tensors make, as yet without magnitude; None: they make none.

    Raises:
        LoraError: a factor is missing, or shapes do not fit.
    """
    if (product := _product(name, parts)) is not None:
        return _as_layer(product, _scale(parts))
    if "diff" in parts and parts["diff"].ndim > 1:
        pair = _whole(matrix(name, parts["diff"]).float())
        return LoraLayer(pair.right, pair.left, None)
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
    product = _product(name, parts)
    return 0 if product is None else product.rank * sum(product.shape) * _BYTES


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
    return tensor.contiguous()


def _product(name: str, parts: Parts) -> Product | None:
    if any(role.startswith("lokr_") for role in parts):
        return Product(_kron_side(name, parts, "w1"), _kron_side(name, parts, "w2"), elementwise=False)
    if not any(role.startswith("hada_") for role in parts):
        return None
    one, two = (_factored(name, parts, f"hada_w{i}_a", f"hada_w{i}_b", f"hada_t{i}") for i in (1, 2))
    shapes = [(pair.left.shape[0], pair.right.shape[1]) for pair in (one, two)]
    if shapes[0] != shapes[1]:
        raise LoraError(
            f"layer {name!r} multiplies matrices of shapes {shapes[0]} and {shapes[1]} elementwise; the file is "
            "damaged, download it again"
        )
    return Product(one, two, elementwise=True)


def _kron_side(name: str, parts: Parts, side: str) -> Pair:
    """One factor of a LoKr: whole (then the smaller side is an identity), a product, or a product around a core."""
    if (whole := parts.get(f"lokr_{side}")) is not None:
        return _whole(matrix(name, whole).float())
    return _factored(name, parts, f"lokr_{side}_a", f"lokr_{side}_b", "lokr_t2" if side == "w2" else None)


def _factored(name: str, parts: Parts, a: str, b: str, core: str | None) -> Pair:
    left, right = matrix(name, _need(name, parts, a)).float(), matrix(name, _need(name, parts, b)).float()
    if core is not None and core in parts:  # then a is stored [r, outputs]
        middle = matrix(name, parts[core]).float()
        if (left.shape[0], right.shape[0]) != tuple(middle.shape):
            raise _apart(name, a, left, b, right)
        return Pair(left.T.contiguous(), middle @ right)
    if left.shape[1] != right.shape[0]:
        raise _apart(name, a, left, b, right)
    return Pair(left, right)


def _whole(full: Tensor) -> Pair:
    """A matrix as a pair of its smaller side's rank."""
    rows, columns = full.shape
    if rows < columns:
        return Pair(torch.eye(rows, dtype=torch.float32), full)
    return Pair(full, torch.eye(columns, dtype=torch.float32))


def _as_layer(product: Product, scale: float | None) -> LoraLayer:
    one, two, elementwise = product
    outputs, inputs = product.shape
    rank = one.left.shape[1] * two.left.shape[1]
    if rank >= min(outputs, inputs):
        first, second = one.left @ one.right, two.left @ two.right
        up, down = _whole(first * second if elementwise else torch.kron(first, second))
    elif elementwise:
        up = (one.left[:, :, None] * two.left[:, None, :]).reshape(outputs, rank)
        down = (one.right[:, None, :] * two.right[None, :, :]).reshape(rank, inputs)
    else:
        up, down = torch.kron(one.left, two.left), torch.kron(one.right, two.right)
    return LoraLayer(down, up, None if scale is None else scale * product.rank)


def _scale(parts: Parts) -> float | None:
    """alpha / rank of a LoKr or LoHa; without a factored side the alpha means nothing, as in LyCORIS."""
    alpha = _alpha(parts)
    for role in ("lokr_w2_b", "lokr_w1_b", "hada_w1_b"):
        if alpha is not None and (factor := parts.get(role)) is not None:
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
