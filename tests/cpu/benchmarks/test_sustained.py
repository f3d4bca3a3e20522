"""Interleaving, the sustained half, energy, and a plan that fails in the middle."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import sustained as module
from benchmarks.sustained import Burst, repeated, spread_of, sustained


def nobody(name: str, error: Exception) -> None:
    raise AssertionError(name) from error


def test_bursts_take_turns_and_the_later_half_counts() -> None:
    order: list[str] = []

    def burst(name: str, values: list[float]) -> Callable[[], Burst]:
        def run() -> Burst:
            order.append(name)
            return Burst([values.pop(0)] * 3, 4)

        return run

    found = sustained({"a": burst("a", [1.0, 3.0]), "b": burst("b", [9.0, 7.0])}, 1e-9, nobody)
    assert order == ["a", "b", "a", "b"]
    assert found["a"][:2] == (3.0, (3.0, 3.0))
    assert found["b"].ms == 7.0


def test_each_runs_for_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    runs = {"fast": 0, "slow": 0}

    def burst(name: str, seconds: float) -> Callable[[], Burst]:
        def run() -> Burst:
            runs[name] += 1
            now[0] += seconds
            return Burst([seconds], 1)

        return run

    sustained({"fast": burst("fast", 1.0), "slow": burst("slow", 10.0)}, 5.0, nobody)
    assert runs == {"fast": 5, "slow": 5}


def test_energy_is_of_all_units_of_the_later_half(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = [0.0]
    used = iter([100.0, 8.0, 12.0, 20.0])
    monkeypatch.setattr(module, "joules", lambda: counter[0])

    def run() -> Burst:
        counter[0] += next(used)
        return Burst([1.0], 4)

    monkeypatch.setattr(module.time, "perf_counter", iter(range(100)).__next__)
    assert sustained({"a": run}, 4.0, nobody)["a"].joules == (12.0 + 20.0) / 8


def test_without_a_counter_there_is_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "joules", lambda: None)
    assert sustained({"a": lambda: Burst([1.0], 1)}, 1e-9, nobody)["a"].joules is None


def test_one_that_fails_leaves_the_others() -> None:
    failures: list[tuple[str, str]] = []
    left = [Burst([1.0], 1)]
    found = sustained(
        {"bad": lambda: left.pop(), "good": lambda: Burst([2.0], 1)},
        1e-9,
        lambda name, error: failures.append((name, type(error).__name__)),
    )
    assert failures == [("bad", "IndexError")]
    assert found.keys() == {"good"}
    assert sustained({}, 1.0, nobody) == {}


def test_a_burst_is_repeated_until_it_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BURST_S", 2.5)
    monkeypatch.setattr(module.time, "perf_counter", iter(range(100)).__next__)
    assert repeated(lambda: Burst([1.0, 2.0], 8)) == Burst([1.0, 2.0] * 3, 24)


def test_spread() -> None:
    assert spread_of([float(value) for value in range(101)]) == (5.0, 95.0)
    assert spread_of([3.0]) == (3.0, 3.0)
    low, high = spread_of([1.0, 2.0])
    assert 1.0 <= low < high <= 2.0
