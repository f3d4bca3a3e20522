"""Layouts: there and back is the same bits, what is added is zero, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedit import ops
from fusedit.errors import OpError
from fusedit.ops import _rows, _transpose

SHAPES = [(2, 64, 8, 16), (3, 75, 13, 9), (1, 3, 17, 40), (1, 16, 5, 7), (2, 1, 1, 1), (0, 32, 9, 9), (1, 32, 8, 8)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nchw": lambda x: x,
    "nhwc": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
    "batch-inside": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "expanded": lambda x: x[:, :, :1, :1].expand_as(x),
}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def every_bit(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits: NaN of every payload, infinities, subnormals, negative zeros."""
    size = torch.empty((), dtype=dtype).element_size()
    x = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)
    for place, value in enumerate((float("nan"), float("inf"), -float("inf"), -0.0)):
        if x.numel() > place:
            x.view(-1)[place] = value
    return x


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    x = LAYOUTS[layout](every_bit(shape, dtype))
    before = bits(x.clone())
    last = ops.nchw_to_nhwc(x)
    first = ops.nhwc_to_nchw(last)
    assert last.stride() == torch.empty(shape).to(memory_format=torch.channels_last).stride()
    assert first.is_contiguous()
    for y in (last, first):
        assert torch.equal(bits(y), before)
    for channels in (32, 64):
        for source in (x, last, first):
            t = ops.pack_tiles(source, channels)
            y = ops.unpack_tiles(t, *shape[1:])
            assert t.is_contiguous()
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(bits(y), before)
    assert torch.equal(bits(x), before)


@pytest.mark.parametrize("channels", [32, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_hold_what_the_formula_says_and_zeros(shape: tuple[int, ...], channels: int) -> None:
    x = torch.rand(shape) + 1
    t = ops.pack_tiles(x, channels)
    N, C, H, W = shape
    assert t.shape == (N, -(-H // 8), -(-W // 8), -(-C // channels), 8, 8, channels)
    assert int((t != 0).sum()) == x.numel()
    assert t.sum(dtype=torch.float64).item() == pytest.approx(x.sum(dtype=torch.float64).item())
    generator = torch.Generator().manual_seed(0)
    for _ in range(20 if N else 0):
        n, c, h, w = (int(torch.randint(0, size, (), generator=generator)) for size in shape)
        assert t[n, h // 8, w // 8, c // channels, h % 8, w % 8, c % channels] == x[n, c, h, w]


def test_padding_is_zero_in_memory_that_held_something_else() -> None:
    x = torch.full((1, 33, 9, 9), float("inf"))
    out = torch.full((1, 2, 2, 2, 8, 8, 40), float("nan"))[..., :32]
    ops.pack_tiles(x, out=out)
    whole = out.permute(0, 3, 6, 1, 4, 2, 5).reshape(1, 64, 16, 16)
    assert bool((whole[:, :33, :9, :9] == float("inf")).all())
    whole[:, :33, :9, :9] = 0
    assert torch.equal(bits(whole), torch.zeros_like(bits(whole)))


def test_what_pads_tiles_is_not_read() -> None:
    t = torch.full((1, 2, 2, 2, 8, 8, 32), float("nan"))
    x = torch.randn(1, 33, 9, 9)
    t[:, :, :, :, :, :, :] = torch.where(ops.pack_tiles(torch.ones_like(x)) > 0, ops.pack_tiles(x), t)
    assert torch.equal(ops.unpack_tiles(t, 33, 9, 9), x)


def test_out_in_another_layout() -> None:
    x = torch.randn(2, 40, 9, 8)
    for layout in (torch.channels_last, torch.contiguous_format):
        for call in (ops.nchw_to_nhwc, ops.nhwc_to_nchw):
            out = torch.empty_like(x, memory_format=layout)
            assert call(x, out=out) is out
            assert torch.equal(out, x)
        out = torch.empty_like(x, memory_format=layout)
        assert torch.equal(ops.unpack_tiles(ops.pack_tiles(x), 40, 9, 8, out=out), x)
    buffer = torch.zeros(2, 100, 9, 8).contiguous(memory_format=torch.channels_last)
    ops.nchw_to_nhwc(x, out=buffer[:, 50:90])  # channels of wider pixels
    assert torch.equal(buffer[:, 50:90], x)
    assert not buffer[:, :50].any()
    assert not buffer[:, 90:].any()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ops.pack_tiles(X, 33), "pack_tiles: channels must be 32 or 64, not int 33"),
        (lambda: ops.pack_tiles(X, 32.0), "pack_tiles: channels must be a whole number, not float 32.0"),
        (lambda: ops.pack_tiles(X, True), "pack_tiles: channels must be a whole number, not bool True"),
        (lambda: ops.pack_tiles(X[0]), "pack_tiles: x must be [N, C, H, W], not float32[40, 9, 8] on cpu"),
        (
            lambda: ops.unpack_tiles(X, 40, 9, 8),
            "unpack_tiles: t must have at least 7 dimensions, not float32[2, 40, 9",
        ),
        (lambda: ops.unpack_tiles(PACKED, 40, 9, 8.0), "unpack_tiles: W must be a whole number, not float 8.0"),
        (
            lambda: ops.unpack_tiles(PACKED, 40, 9, 9),
            "unpack_tiles: t must be [2, 2, 2, 2, 8, 8, 32] for C, H, W = 40, ",
        ),
        (lambda: ops.unpack_tiles(PACKED[None], 40, 9, 8), "unpack_tiles: t must have tiles of 32 or 64 channels, not"),
        (
            lambda: ops.unpack_tiles(PACKED[:, :0], 40, -3, 8),
            "unpack_tiles: t must be [2, 0, 1, 2, 8, 8, 32] for C, H, W",
        ),
        (
            lambda: ops.unpack_tiles(PACKED, 40, 9, 8, out=X[:1]),
            "unpack_tiles: out must be float32[2, 40, 9, 8] on cpu, ",
        ),
        (lambda: ops.nchw_to_nhwc(X, out=X.transpose(2, 3)), "nchw_to_nhwc: out must be float32[2, 40, 9, 8] on cpu, "),
        (
            lambda: ops.nchw_to_nhwc(SQUARE, out=SQUARE.mT),
            "nchw_to_nhwc: out float32[1, 4, 5, 5] on cpu partly overlaps",
        ),
    ],
)
def test_what_cannot_be(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(OpError) as raised:
        call()
    assert str(raised.value).startswith(said)


X, SQUARE = torch.randn(2, 40, 9, 8), torch.randn(1, 4, 5, 5)
PACKED = ops.pack_tiles(X)


# -- how the kernel is told of memory ------------------------------------------------------------------------------


def test_vectors_only_where_every_run_starts_on_16_bytes() -> None:
    x = torch.zeros(2, 64, 6, 8, dtype=torch.bfloat16)
    last = x.contiguous(memory_format=torch.channels_last)

    def side(t: torch.Tensor) -> tuple[int, int]:
        made = _transpose.strided(t, flat=_transpose.foldable(t))
        return made.dense, made.vec

    assert side(x) == (_transpose.ALONG_PIXELS, 8)
    assert side(x.float()) == (_transpose.ALONG_PIXELS, 4)
    assert side(last) == (_transpose.ALONG_CHANNELS, 8)
    assert side(last[:, 8:24]) == (_transpose.ALONG_CHANNELS, 8)
    assert side(last[:, 4:24]) == (_transpose.ALONG_CHANNELS, 1)
    assert side(last[:, :60]) == (_transpose.ALONG_CHANNELS, 1)
    assert side(x[..., :4]) == (_transpose.ALONG_PIXELS, 1)
    assert side(x[:, :, :5]) == (_transpose.ALONG_PIXELS, 8)
    assert side(x[..., :1]) == (_transpose.NEITHER, 1)
    assert side(x.mT) == (_transpose.NEITHER, 1)
    odd = torch.zeros(1, 3, 5, 5, dtype=torch.bfloat16)
    assert side(odd) == (_transpose.ALONG_PIXELS, 1)
    assert side(odd.contiguous(memory_format=torch.channels_last)) == (_transpose.ALONG_CHANNELS, 1)


def test_a_picture_is_one_row_where_its_rows_follow_each_other() -> None:
    x = torch.zeros(2, 64, 6, 8)
    assert all(map(_transpose.foldable, (x, x[:, 3:], x[:, :, :4], x.contiguous(memory_format=torch.channels_last))))
    assert all(map(_transpose.foldable, (x[..., :1], x[:, :, :1], x[..., :1, :1], x[:, :1].expand(2, 64, 6, 8))))
    assert not any(map(_transpose.foldable, (x[..., :7], x.mT, x[:, :, ::2])))
    assert _transpose.strided(x, flat=True).sizes == (1, 64, 48)
    assert _transpose.strided(x, flat=True).numbers() == (1, 64, 12, 768, 0, 0, 12, 0, 0)
    assert _transpose.strided(x, flat=False).numbers() == (6, 64, 2, 768, 2, 0, 12, 0, 0)
    assert _transpose.strided(x[..., :1], flat=True).steps[:3] == (3072, 0, 8)


def test_few_variants_serve_all_sizes() -> None:
    assert sorted({_transpose.block_of(C) for C in range(1, 3000)}) == [4, 16, 32, 64]
    assert [_transpose.block_of(C) for C in (3, 16, 128, 512)] == [4, 16, 64, 64]


def test_more_than_the_kernel_can_count() -> None:
    assert ops.nchw_to_nhwc._limit is not None
    assert _rows.too_many(1, 4096, 4096) == ""
    assert _rows.too_many(1, 65536, 65536) == "1 images of 65536 x 65536 are too many"
    assert _rows.too_many(65536, 8, 8) == "65536 images of 8 x 8 are too many"
    huge = torch.empty(70000, 1, 8, 8, device="meta")
    for op, args in ((ops.nchw_to_nhwc, ()), (ops.nhwc_to_nchw, ()), (ops.pack_tiles, (64,))):
        assert "too many" in op._limit(huge, *args)
    assert "too many" in ops.unpack_tiles._limit(huge, 1, 8, 8)
