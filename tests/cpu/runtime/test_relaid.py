"""Weights of convolutions laid channels_last in place, and put back: the function itself, on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedit.runtime import relaid
from fusedit.runtime.counters import Counters
from fusedit.runtime.homes import lies_channels_last, unpack

CPU = torch.device("cpu")
OTHER = "a weight shares its storage with another tensor"


class Net(nn.Module):
    """Two convolutions 3x3, one with a single tap, one with a single channel, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.rest = nn.ModuleList([nn.Conv2d(8, 8, 3, stride=2), nn.Conv2d(8, 4, 1), nn.Conv2d(1, 4, 3)])
        self.norm = nn.GroupNorm(2, 8)

    @property
    def convs(self) -> tuple[nn.Conv2d, nn.Conv2d]:
        return self.first, self.rest[0]  # type: ignore[return-value]

    @property
    def weights(self) -> list[nn.Parameter]:
        return [conv.weight for conv in self.convs]


def lay(net: nn.Module, dtype: torch.dtype = torch.float32, *, offloaded: bool = False) -> dict[str, int]:
    counters = Counters()
    relaid.lay(net, CPU, dtype, counters, offloaded=offloaded)
    return dict(counters.events)


def strides(net: nn.Module) -> list[tuple[int, ...]]:
    return [p.stride() for p in net.parameters()]


def own_storages(net: nn.Module) -> bool:
    return all(p.untyped_storage().nbytes() == p.nbytes for p in net.parameters())


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_only_strides_change_and_only_once(net: Net) -> None:
    parameters, values, before = list(net.parameters()), [p.detach().clone() for p in net.parameters()], strides(net)
    assert lay(net) == {relaid.LAID: 2}
    assert all(map(lies_channels_last, net.weights))
    assert all(w.stride(1) == 1 for w in net.weights)
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert all(map(torch.equal, parameters, values))
    assert own_storages(net)
    assert sum(a != b for a, b in zip(strides(net), before, strict=True)) == 2
    places = [p.data_ptr() for p in parameters]
    assert lay(net) == {}
    assert [p.data_ptr() for p in parameters] == places
    relaid.put_back(net)
    assert strides(net) == before
    assert all(map(torch.equal, parameters, values))
    assert own_storages(net)
    relaid.put_back(net)
    assert strides(net) == before


def test_edits_take_effect_and_stay(net: Net) -> None:
    x = torch.randn(1, 3, 9, 9)
    lay(net)
    with torch.no_grad():
        net.first.weight.mul_(2)
        net.first.weight.data += 1
        net.first.weight[0, 1, 2, 0] = 7.0
    changed = net.first.weight.detach().clone(memory_format=torch.contiguous_format)
    assert changed[0, 1, 2, 0] == 7.0
    torch.testing.assert_close(net.first(x), F.conv2d(x, changed, net.first.bias))
    assert lay(net) == {}
    relaid.put_back(net)
    assert torch.equal(net.first.weight, changed)


# What somebody else does meanwhile


def moved(net: Net) -> None:
    for p in net.parameters():
        p.data = p.data.clone()  # as `.to("cpu")` and back


def float64(net: Net) -> None:
    net.double()


def loaded(net: Net) -> None:
    net.load_state_dict({name: 2 * value.contiguous() for name, value in net.state_dict().items()})


@pytest.mark.parametrize("change", [moved, float64, loaded])
def test_strides_that_survive_a_change_go_back(net: Net, change: Callable[[Net], None]) -> None:
    before = strides(net)
    lay(net)
    change(net)
    assert all(map(lies_channels_last, net.weights))
    values = [w.detach().clone() for w in net.weights]
    relaid.put_back(net)
    assert strides(net) == before
    assert all(map(torch.equal, net.weights, values))


def test_what_was_relaid_or_replaced_by_somebody_else_is_left_alone(net: Net) -> None:
    lay(net)
    old = net.rest[0].weight
    net.first.weight.data = net.first.weight.data.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    odd = net.first.weight.stride()
    net.rest[0].weight = nn.Parameter(old.detach().clone())
    place = net.rest[0].weight.data_ptr()
    relaid.put_back(net)
    assert net.first.weight.stride() == odd
    assert net.rest[0].weight.data_ptr() == place
    assert lies_channels_last(net.rest[0].weight)
    assert old.is_contiguous()


def test_a_weight_made_contiguous_is_laid_again(net: Net) -> None:
    lay(net)
    net.first.weight.data = net.first.weight.data.contiguous()
    assert lay(net) == {relaid.LAID: 1}
    relaid.put_back(net)
    assert net.first.weight.is_contiguous()


def test_new_parameters_are_laid_and_the_old_ones_go_back(net: Net) -> None:
    lay(net)
    old = net.weights
    net.load_state_dict({name: value.clone().contiguous() for name, value in net.state_dict().items()}, assign=True)
    assert lay(net) == {relaid.LAID: 2}
    relaid.put_back(net)
    assert all(w.is_contiguous() for w in (*old, *net.weights))


def test_channels_last_of_its_owner_is_no_concern(net: Net) -> None:
    net.to(memory_format=torch.channels_last)
    before, places = strides(net), [p.data_ptr() for p in net.parameters()]
    assert lay(net) == {}
    relaid.put_back(net)
    unpack(net.parameters())
    assert strides(net) == before
    assert [p.data_ptr() for p in net.parameters()] == places


def test_parameters_that_two_modules_have_go_back_with_the_first_that_lets_go(net: Net) -> None:
    other = Net()
    other.first = net.first
    lay(net)
    lay(other)
    unpack(other.parameters())
    assert net.first.weight.is_contiguous()
    relaid.put_back(net)
    assert all(w.is_contiguous() for w in (*net.weights, *other.rest[0].parameters()))


# What is not laid


def inference(net: Net) -> None:
    with torch.inference_mode():
        net.first.weight = nn.Parameter(net.first.weight.clone(), requires_grad=False)


def part_of_a_buffer(net: Net) -> None:
    buffer = torch.cat([net.first.weight.detach().flatten(), torch.zeros(5)])
    net.first.weight.data = buffer[: net.first.weight.numel()].view_as(net.first.weight)


def tied(net: Net) -> None:
    net.extra = nn.Conv2d(3, 8, 3)
    net.extra.weight.data = net.first.weight.data


def odd_strides(net: Net) -> None:
    net.first.weight.data = net.first.weight.data.transpose(2, 3)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (inference, "weights loaded under inference_mode"),
        (part_of_a_buffer, OTHER),
        (tied, OTHER),
        (odd_strides, OTHER),
    ],
)
def test_what_may_not_be_laid_stays_and_is_counted_once_a_call(
    net: Net, edit: Callable[[Net], None], reason: str
) -> None:
    edit(net)
    before = strides(net)[0], net.first.weight.data_ptr()
    assert lay(net) == {relaid.LAID: 1, f"{relaid.LEFT}: {reason}": 1}
    assert (net.first.weight.stride(), net.first.weight.data_ptr()) == before
    assert lay(net) == {f"{relaid.LEFT}: {reason}": 1}
    relaid.put_back(net)
    assert (net.first.weight.stride(), net.first.weight.data_ptr()) == before


def of_a_state_dict(net: Net) -> Any:
    return net.state_dict()


def of_another_module(net: Net) -> Any:
    other = Net()
    other.load_state_dict(net.state_dict(), assign=True)
    return other.state_dict()


@pytest.mark.parametrize("share", [of_a_state_dict, of_another_module])
def test_what_somebody_else_holds_stays_so_that_an_edit_of_it_reaches_the_weight(
    net: Net, share: Callable[[Net], Any]
) -> None:
    before = strides(net)
    held = share(net)
    assert lay(net) == {f"{relaid.LEFT}: {OTHER}": 1}
    assert strides(net) == before
    with torch.no_grad():
        held["first.weight"].mul_(2)
        held["rest.0.weight"].fill_(1)
    assert all(map(torch.equal, net.weights, (held["first.weight"], held["rest.0.weight"])))
    del held
    assert lay(net) == {relaid.LAID: 2}


def test_one_parameter_of_two_layers_is_laid_once(net: Net) -> None:
    net.extra = nn.Conv2d(3, 8, 3)
    net.extra.weight = net.first.weight
    assert lay(net) == {relaid.LAID: 2}
    assert net.extra.weight is net.first.weight
    relaid.put_back(net)
    assert net.extra.weight.is_contiguous()


def test_offload_capture_and_lack_of_memory_lay_nothing(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    before = strides(net), [p.data_ptr() for p in net.parameters()]
    assert lay(net, offloaded=True) == {f"{relaid.LEFT}: weights move between calls (offload)": 1}
    with monkeypatch.context() as patch:
        patch.setattr(relaid, "_capturing", lambda _weights: True)
        assert lay(net) == {f"{relaid.LEFT}: the caller is capturing a graph": 1}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", _full)
        assert lay(net) == {f"{relaid.LEFT}: out of memory": 1}
    assert (strides(net), [p.data_ptr() for p in net.parameters()]) == before
    assert lay(net) == {relaid.LAID: 2}
    with monkeypatch.context() as patch:
        patch.setattr(relaid, "_capturing", lambda _weights: True)
        relaid.put_back(net)
        assert all(map(lies_channels_last, net.weights))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", _full)
        with pytest.raises(torch.OutOfMemoryError):
            relaid.put_back(net)
    relaid.put_back(net)
    assert strides(net) == before[0]


def _full(*_: Any, **__: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_weights_of_another_dtype_or_device_are_passed_over(net: Net) -> None:
    before = strides(net)
    assert lay(net, torch.bfloat16) == {}
    net.half()
    assert lay(net) == {}
    counters = Counters()
    relaid.lay(net, torch.device("meta"), torch.float16, counters)
    assert not counters.events
    assert strides(net) == before


def test_layers_inside_a_lora_layer_are_left_alone(net: Net) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=2, target_modules=["first"]), net)
    assert lay(net) == {relaid.LAID: 1}
    assert net.first.base_layer.weight.is_contiguous()
    assert lies_channels_last(net.rest[0].weight)


def test_parameters_stay_ordinary_ones_under_inference_mode(net: Net) -> None:
    before = strides(net)
    with torch.inference_mode():
        assert lay(net) == {relaid.LAID: 2}
        assert all(map(lies_channels_last, net.weights))
        relaid.put_back(net)
    assert strides(net) == before
    assert not any(p.is_inference() for p in net.parameters())


def test_gradients_flow_to_weights_that_were_laid(net: Net) -> None:
    x = torch.randn(1, 3, 9, 9)
    net.first(x).sum().backward()
    kept = net.first.weight.grad
    assert kept is not None
    lay(net)
    assert net.first.weight.grad is kept
    y = net.first(x).sum()
    relaid.put_back(net)
    y.backward()
    torch.testing.assert_close(net.first.weight.grad, 2 * torch.autograd.grad(net.first(x).sum(), net.first.weight)[0])


def test_laying_and_putting_back_from_two_threads(net: Net) -> None:
    before, values = strides(net), [w.detach().clone() for w in net.weights]
    start = threading.Barrier(2)

    def work(step: Callable[[], object]) -> None:
        start.wait()
        for _ in range(150):
            step()

    steps: tuple[Callable[[], object], ...] = (lambda: lay(net), lambda: relaid.put_back(net))
    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, net.weights, values))
    relaid.put_back(net)
    assert strides(net) == before


def test_nothing_holds_a_module_or_its_weights(net: Net) -> None:
    lay(net)
    relaid.put_back(net)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # refuses tensors that are held weakly
    try:
        net.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
