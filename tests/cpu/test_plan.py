"""Plan: frozen, JSON in and out, and every unknown thing an error that says what is known."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from fusedit.errors import PlanError
from fusedit.plan import Plan


def test_round_trips_through_json() -> None:
    plan = Plan(rewrites={"flux.gelu": False}, evidence={"psnr": 61.5})
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    assert not plan.enabled("flux.gelu")
    assert plan.enabled("flux.attention")
    assert not plan.without("flux.attention").enabled("flux.attention")
    assert plan.enabled("flux.attention"), "without() must not change the plan it was called on"


def test_copies_and_pickles() -> None:
    plan = Plan(rewrites={"flux.gelu": False}, evidence={"runs": [1, 2]})
    assert copy.deepcopy(plan) == copy.copy(plan) == pickle.loads(pickle.dumps(plan)) == plan


def test_is_frozen_all_the_way_down() -> None:
    rewrites = {"flux.gelu": False}
    plan = Plan(rewrites=rewrites)
    rewrites["flux.gelu"] = True
    assert not plan.enabled("flux.gelu")
    with pytest.raises(TypeError):
        plan.rewrites["flux.gelu"] = True  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.base = "fp8"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"schema": 2, "new_key": 1}, r"schema 2 is newer than the 1 .*upgrade"),
        ({"schema": 1, "speed": "max"}, r"unknown plan key 'speed'; known keys: schema, base"),
        ({"base": "exact"}, r"has no 'schema'"),
        ({"schema": 1, "base": "turbo9"}, r"unknown plan 'turbo9'; known tiers: exact, fp8"),
        ({"schema": 1, "rewrites": {"flux.gelu": 1}}, r"'flux.gelu' must be true or false, not 1"),
        ({"schema": 1, "rewrites": []}, r"'rewrites' must be an object, not list"),
        ({"schema": 1, "precision": {"default": "fp8"}}, r"precision.default is 'fp8'"),
        ({"schema": 1, "cache": {"steps": True}}, r"unknown key 'steps' in plan 'cache'; known keys: prompts, graphs"),
        ({"schema": 1, "cache": {"prompts": 1}}, r"plan cache.prompts must be true or false, not 1"),
        (
            {"schema": 1, "cache": {"graphs": {"on": True}}},
            r"plan cache.graphs must be true or false, not {'on': True}",
        ),
        ({"schema": 1, "cache": True}, r"'cache' must be an object, not bool"),
        ({"schema": True}, r"schema is True"),
        ([1], r"a plan is a JSON object, not list"),
    ],
)
def test_bad_data_gets_one_sentence(data: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_dict(data)


def test_a_cache_that_is_not_named_follows_the_tier() -> None:
    assert Plan().cache == {"prompts": True, "graphs": True}
    plan = Plan.from_dict({"schema": 1, "cache": {"prompts": False}})
    assert plan.cache == {"prompts": False, "graphs": True}
    assert plan.without("flux.gelu").cache == plan.cache
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    assert Plan(cache={}) == Plan(cache={"graphs": True}) == Plan()
    assert Plan.from_dict({"schema": 1, "cache": {"prompts": False, "graphs": False}}) != Plan()  # as 0.1.0 wrote it
    with pytest.raises(TypeError):
        plan.cache["graphs"] = False  # type: ignore[index]


def test_of_takes_a_tier_a_plan_or_a_file(tmp_path: Path) -> None:
    plan = Plan(rewrites={"flux.gelu": False})
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert Plan.of(path) == Plan.of(str(path)) == plan
    assert Plan.of(plan) is plan
    assert Plan.of("exact") == Plan()
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(PlanError, match="cannot be read as JSON"):
        Plan.of(tmp_path / "broken.json")
    with pytest.raises(PlanError, match=r"unknown plan 'no\.json'"):
        Plan.of("no.json")
    with pytest.raises(PlanError, match="not int"):
        Plan.of(3)  # type: ignore[arg-type]


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": 1, "budget": ' + '{"a": ' * 50_000])
def test_a_file_nested_too_deep_for_python(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.json").write_text(text)
    with pytest.raises(
        PlanError, match=r"^plan file '.*deep\.json' is nested too deep to be a plan; write a plan JSON$"
    ):
        Plan.of(tmp_path / "deep.json")


@pytest.mark.parametrize("key", ["rewrites", "precision", "cache", "budget", "evidence"])
def test_a_key_nested_too_deep(key: str) -> None:
    with pytest.raises(PlanError, match=f"^plan key '{key}' is nested more than 100 deep; make it flatter$"):
        Plan.from_dict({"schema": 1, key: nested(100)})
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(PlanError, match="nested more than 100 deep"):
        Plan.from_dict({"schema": 1, key: loop})


def test_nesting_that_is_allowed_goes_in_and_out() -> None:
    plan = Plan(budget=nested(49), evidence=nested(49))
    assert Plan.from_dict(json.loads(plan.to_json())) == plan


def test_a_name_that_is_too_long_is_no_plan() -> None:
    with pytest.raises(PlanError, match=r"^unknown plan 'xxx"):
        Plan.of("x" * 5000)


def test_patterns_of_precision_are_text() -> None:
    sites: Any = {5: "fp8"}
    with pytest.raises(PlanError, match=r"^plan precision.sites has 5, which is no pattern over paths; give text$"):
        Plan(base="fp8", precision={"sites": sites})
