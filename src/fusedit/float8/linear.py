"""Float8Linear: a linear layer whose weight is e4m3 with one fp32 scale an output, made in place of an nn.Linear.

The layer stays the object it was, and so does its parameter: hooks, LoRA layers around it and lists of parameters keep
what they have. What it was can lie on the CPU beside it (`original`) or be read again (`elsewhere`), so that it can be
given back bit for bit.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.nn import functional as F

from fusedit.errors import UsageError
from fusedit.float8 import choice
from fusedit.float8.products import quantise, scaled
from fusedit.float8.refusals import why_not_loaded
from fusedit.float8.source import Elsewhere
from fusedit.ops._fp8 import quantized
from fusedit.runtime.install import rebind

Tensor = torch.Tensor
CODES: Final = torch.float8_e4m3fn
_ROWS: Final = 4096
"""Of a weight that are quantised at once: what fp32 temporaries take stays small beside the model."""


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] of any floating dtype -> e4m3 codes [N, K] and scale fp32 [N], amax of each row over 448."""
    codes = torch.empty(weight.shape, dtype=CODES, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for rows in range(0, len(weight), _ROWS):
        part = slice(rows, rows + _ROWS)
        codes[part], scale[part], _ = quantized(weight[part].detach())
    return codes, scale


class Float8Linear(nn.Linear):
    """y = x W^T + bias, W = weight * weight_scale[:, None].

    Attributes:
        weight: e4m3 [N, K].
        weight_scale: fp32 [N], a buffer; in a state dict `<name>.weight_scale`.
        compute_dtype: dtype of what comes out of a product with e4m3 activations, and of LoRA layers around it.
        activations: whether x is quantised too; else the products are made in the dtype of x.
        original: the weight it was made of, on the CPU, or None.
        elsewhere: reads the weight it was made of, where that is not kept here, or None.
        branches: name -> low-rank pairs (down [R, K], up [N, R], scale) that are added: LoRAs that were fused into it.
        choice: how its codes were chosen, see `fusedit.float8.choice`.
    """

    stock_kind: ClassVar[type[nn.Module]] = nn.Linear
    weight_scale: Tensor
    compute_dtype: torch.dtype
    activations: bool
    original: Tensor | None
    elsewhere: Elsewhere | None
    branches: dict[str, list[tuple[Tensor, Tensor, float]]]
    choice: str

    @staticmethod
    def convert(
        layer: nn.Linear,
        *,
        activations: bool,
        keep: bool,
        device: torch.device | None = None,
        codes: tuple[Tensor, Tensor] | None = None,
    ) -> Float8Linear:
        """Make this very layer a Float8Linear, or leave it as it was where that fails.

        Args:
            layer: any nn.Linear.
            activations: see the attribute.
            keep: its weight becomes `original`: that very memory on a CPU, where others may share it, else a copy.
            device: quantises; None: where the weight lies.
            codes: the codes and scale to use, where they were rounded already.
        """
        weight = layer.weight
        made_codes, scale = codes or quantise_weight(weight.data if device is None else weight.data.to(device))
        made_codes, scale = made_codes.to(weight.device), scale.to(weight.device)
        original = weight.data.to("cpu") if keep else None
        dtype = weight.dtype
        weight.data = made_codes
        layer.__class__ = Float8Linear
        rebind(layer, nn.Linear)
        made: Any = layer
        made.become(scale, dtype, activations)
        made.original = original
        return made  # type: ignore[no-any-return]

    def become(self, scale: Tensor, compute_dtype: torch.dtype, activations: bool) -> None:
        """Give a layer of this class what an nn.Linear has not."""
        self.register_buffer("weight_scale", scale)
        self.compute_dtype, self.activations = compute_dtype, activations
        self.original, self.elsewhere, self.branches, self.choice = None, None, {}, ""

    def revert(self, weight: Tensor) -> None:
        """Make this very layer an nn.Linear again, with this weight in the compute dtype, and branches added to it."""
        self.weight.data = self._merged(weight.to(self.weight.device, self.compute_dtype))
        del self._buffers["weight_scale"]
        for name in _OWN:
            del self.__dict__[name]
        self.__class__ = nn.Linear  # type: ignore[assignment]
        rebind(self, Float8Linear)

    def first(self) -> Tensor | None:
        """The weight it was made of, or None where nobody has that any more.

        Raises:
            RestoreError: it is read from a file, which has changed.
        """
        return self.elsewhere() if self.original is None and self.elsewhere is not None else self.original

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        double = input.dtype is torch.float64  # which no product of codes gives
        if self.activations and not double and not (torch.is_grad_enabled() and input.requires_grad):
            x = quantise(input)
            y = scaled(x, self.weight, self.weight_scale, self.bias, input.dtype)
        else:
            y = F.linear(input, self.dequantised(input.dtype), self.bias)
        return self._with_branches(y, input)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in this dtype."""
        return (self.weight.detach().float() * self.weight_scale[:, None]).to(dtype)

    def _with_branches(self, y: Tensor, x: Tensor) -> Tensor:
        for pairs in self.branches.values():
            for down, up, scale in pairs:
                y = y + F.linear(F.linear(x.to(down.dtype), down), up).to(y.dtype) * scale
        return y

    def _merged(self, weight: Tensor) -> Tensor:
        """weight [N, K] with the branches added, as merging a LoRA does it; itself where there are none."""
        pairs = [pair for each in self.branches.values() for pair in each]
        if not pairs:
            return weight
        wide = weight.float()
        for down, up, scale in pairs:
            wide = wide + scale * (up.float() @ down.float()).to(wide.device)
        return wide.to(weight.dtype)

    def dequantize(self) -> Tensor:
        """The weight in the compute dtype, by the name that peft asks layers with a `W_q` for: DoRA needs its norm."""
        return self.dequantised(self.compute_dtype)

    @property
    def W_q(self) -> Tensor:
        """The codes; see `dequantize`."""
        return self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`fn` of everything, but of codes and scale as whole numbers: `.to(dtype)` must not take them for values.

        Raises:
            UsageError: to a dtype of 8 bits, in which nothing can be computed.
        """
        dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight.device)).dtype
        if dtype.itemsize == 1:
            raise UsageError(
                f"a layer with e4m3 weights cannot be moved to {dtype}, as layerwise casting does; leave that out, it "
                "is stored in 8 bits already"
            )
        weight, scale = self._parameters.pop("weight"), self._buffers.pop("weight_scale")
        assert weight is not None
        assert scale is not None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            codes = fn(weight.data.view(torch.uint8)).view(CODES)
            scale = fn(scale.view(torch.int32)).view(torch.float32)
            self.compute_dtype = dtype
            for pairs in self.branches.values():
                pairs[:] = [(fn(down), fn(up), by) for down, up, by in pairs]
            if torch._has_compatible_shallow_copy_type(weight, codes):
                weight.data = codes
            else:
                weight = nn.Parameter(codes, weight.requires_grad)
        finally:
            self._parameters = {"weight": weight, **self._parameters}
            self._buffers["weight_scale"] = scale
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Codes with their scale as they are; a weight of another dtype is quantised, and kept if the first one was.

        The very weight that the layer was made of, or the codes that it has, change nothing. See `why_not_loaded` for
        what is refused.
        """
        given, scale = state_dict.get(prefix + "weight"), state_dict.get(prefix + "weight_scale")
        refused = why_not_loaded(given, scale)
        if refused is not None:  # nothing of this layer is loaded; torch goes on with the others and raises at the end
            error_msgs.append(prefix + refused.format(prefix=prefix))
            return
        if given is not None and given.dtype is not CODES and given.shape == self.weight.shape:
            if self._made_of(given):
                codes, scale = self.weight.data, self.weight_scale
            else:
                if self.original is not None or self.elsewhere is not None:
                    self.original, self.elsewhere = given.detach().to("cpu", copy=True), None
                codes, scale = quantise_weight(given.to(self.weight.device, self.compute_dtype))
                # Without a choice nearest codes were asked for, and these are.
                self.choice = self.choice and choice.nearest("their weights were loaded after the conversion")
            state_dict = {**state_dict, prefix + "weight": codes, prefix + "weight_scale": scale}
        elif given is not None and given.shape == self.weight.shape and not self._has(given, scale):
            self.original = self.elsewhere = None  # the codes are all there is now
            self.choice = choice.LOADED
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _has(self, codes: Tensor, scale: Tensor | None) -> bool:
        """Whether these are its codes."""
        return scale is not None and _same_bits(codes, self.weight) and _same_bits(scale, self.weight_scale)

    def _made_of(self, weight: Tensor) -> bool:
        """Whether a stock layer that loads this weight would hold what restore() gives back anyway."""
        given = weight.detach().to(self.compute_dtype)
        if self.original is not None:
            return _same_bits(given, self.original.to(self.compute_dtype))
        return self.elsewhere is not None and self.elsewhere.same(given)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or pickle is the stock layer where the original weight can be had, else a Float8Linear."""
        state = dict(self.__dict__)
        first = self.first()
        if first is None:  # as whole numbers: pickle does not know e4m3
            codes = nn.Parameter(self.weight.data.view(torch.uint8), False)
            state["_parameters"] = {**self._parameters, "weight": codes}
            return _revived, (state, self.weight.requires_grad)
        weight = self._merged(first.to(self.weight.device, self.compute_dtype))
        state["_parameters"] = {**self._parameters, "weight": nn.Parameter(weight, self.weight.requires_grad)}
        state["_buffers"] = {key: value for key, value in self._buffers.items() if key != "weight_scale"}
        made: Any = copyreg._reconstructor  # type: ignore[attr-defined]  # so that a pickle needs no fusedit
        return made, (nn.Linear, object, None), {key: value for key, value in state.items() if key not in _OWN}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, e4m3, {'activations too' if self.activations else 'weights only'}"


_OWN: Final = ("compute_dtype", "activations", "original", "elsewhere", "branches", "choice")
"""Attributes that an nn.Linear has not."""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Also of NaN, and not of 0 and -0."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.is_meta or b.is_meta:
        return False
    a, b = (t.detach().contiguous().view(torch.uint8) for t in (a, b))
    return torch.equal(a.to(b.device), b)


def _revived(state: dict[str, Any], requires_grad: bool) -> Float8Linear:
    made = Float8Linear.__new__(Float8Linear)
    made.__dict__.update(state)
    made._parameters = dict(made._parameters)
    codes = state["_parameters"]["weight"].data.view(CODES)
    made._parameters["weight"] = nn.Parameter(codes, requires_grad)
    return made
