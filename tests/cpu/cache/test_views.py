"""Encoders that remember: whatever is read from an output is what the encoder gives, kept or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from fusedit.cache.store import Store
from fusedit.cache.views import Run


class Encoder(nn.Module):
    """Gives an output with a tuple inside, a tuple, or a tensor, and counts its calls outside of its attributes."""

    def __init__(self, gives: str, calls: list[int]) -> None:
        super().__init__()
        self.gives = gives
        self.weight = nn.Parameter(torch.ones(3))
        object.__setattr__(self, "_count", calls.append)

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        self._count(1)
        a, b = x * self.weight, x + self.weight
        return {"output": BaseModelOutput(last_hidden_state=a, hidden_states=(a, b)), "tuple": (a, b), "tensor": a}[
            self.gives
        ]


@pytest.fixture
def calls() -> list[int]:
    return []


def runner(gives: str, calls: list[int]) -> Any:
    store, encoder = Store(), Encoder(gives, calls).eval()

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Run]:
        this = Run(store)
        with torch.no_grad():
            return this.encode("encoder", encoder, args, kwargs), this

    return run


X = torch.arange(3.0)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_everything_that_can_be_read_is_what_the_encoder_gives(times: int, calls: list[int]) -> None:
    run = runner("output", calls)
    for _ in range(times):
        out, _this = run(X)
        assert torch.equal(out.last_hidden_state, X)
        assert torch.equal(out[0], X)
        assert torch.equal(out["last_hidden_state"], X)
        assert torch.equal(out.hidden_states[-1], X + 1)
        assert torch.equal(out.hidden_states[1], X + 1)
    assert len(calls) == 1


def test_what_was_not_kept_is_computed_after_all(calls: list[int]) -> None:
    run = runner("output", calls)
    run(X)[0].last_hidden_state  # noqa: B018
    out, this = run(X)
    assert torch.equal(out.last_hidden_state, X)
    assert (this.reused, this.computed) == (True, False)
    assert torch.equal(out.hidden_states[1], X + 1)
    assert (this.reused, this.computed) == (True, True)
    assert len(calls) == 2
    out, this = run(X)
    assert torch.equal(out.hidden_states[1], X + 1)
    assert not this.computed, "and kept from then on"
    assert out.attentions is None
    with pytest.raises(AttributeError, match="nonsense"):
        out.nonsense  # noqa: B018
    assert len(calls) == 3


def test_outputs_behave_as_tuples(calls: list[int]) -> None:
    run = runner("tuple", calls)
    for _ in range(2):
        out, _this = run(X)
        a, b = out
        assert torch.equal(a, X)
        assert torch.equal(b, X + 1)
        assert len(out) == 2
        assert torch.equal(out[:1][0], X)
    run = runner("tensor", calls)
    calls.clear()
    for _ in range(2):
        got = run(X)[0]
        assert torch.equal(got, X)
        got.zero_()
    assert len(calls) == 1


def test_arguments_are_compared_by_content_type_and_place(calls: list[int]) -> None:
    run = runner("tensor", calls)
    different: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((X,), {}),
        ((), {"x": X}),
        ((X.double(),), {}),
        ((X.view(1, 3),), {}),
        ((-X,), {}),  # -0.0 is not 0.0
        ((X,), {"flag": True}),
        ((X,), {"flag": 1}),
        ((X,), {"flag": None}),
        ((X,), {"flag": []}),
        ((X,), {"flag": ()}),
        ((X,), {"flag": {}}),
        ((X,), {"flag": {"a": X}}),
    ]
    for args, kwargs in different * 2:
        run(*args, **kwargs)
    assert len(calls) == len(different)
    assert torch.equal(run(X.clone())[0], X)
    assert len(calls) == len(different)


def test_arguments_that_cannot_be_compared_run_the_encoder(calls: list[int]) -> None:
    run = runner("tensor", calls)
    for argument in (object(), {"a": object()}, [object()], X.to_sparse()):
        got, this = run(X, flag=argument)
        assert torch.equal(got, X)
        assert this.reasons == {"encoder got an argument that cannot be compared"}
    assert len(calls) == 4


def test_inputs_and_kept_values_edited_in_place_change_nothing(calls: list[int]) -> None:
    run = runner("tensor", calls)
    x = X.clone()
    run(x)[0].zero_()
    x += 1
    assert torch.equal(run(x)[0], X + 1)
    assert torch.equal(run(X)[0], X)
    assert len(calls) == 2
