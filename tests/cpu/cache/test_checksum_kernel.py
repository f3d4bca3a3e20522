"""The kernel of checksums() without a GPU: its numbers through the interpreter, its machine code for six chips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.scripts import once, run_script

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = HERE / "run_checksum_interpreted.py"
    return once(tmp_path_factory, "checksum", lambda: run_script(script, TRITON_INTERPRET="1"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script, cache = HERE / "run_checksum_compiled.py", str(tmp_path_factory.mktemp("triton"))
    return once(tmp_path_factory, "checksum-compiled", lambda: run_script(script, TRITON_CACHE_DIR=cache))


CASES = (
    *("aligned", "at 1", "at 2", "at 4", "at 8", "at 16"),
    *("dtypes", "scalars", "strided", "empty", "empty among others", "parameter", "many"),
)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_the_numbers_of_plain_torch(interpreted: dict[str, Any], case: str) -> None:
    assert set(interpreted) == set(CASES)
    found = interpreted[case]
    assert found["launched"]
    assert found["kernel"] == found["plain"]
    assert any(found["kernel"]) == (case != "empty")


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_machine_code(compiled: dict[str, Any], capability: int) -> None:
    """No spills; whole tiles come by 16 bytes a thread; 12 programs of 128 threads fit a multiprocessor."""
    made = compiled[str(capability)]
    assert made["stack"] == 0
    assert made["shared"] <= 1024
    assert made["registers"] <= 42
    loads = [access for access in made["accesses"] if access.startswith("ld")]
    wide = [access for access in loads if access.endswith((".v2.b64", ".v4.b32"))]
    assert len(wide) == 16
    single = [access for access in loads if access.endswith(".b8")]
    tables = 4
    assert len(wide) + len(single) + tables == len(loads)


def test_no_number_and_no_address_compiles_anew() -> None:
    from fusedit.cache.checksum_kernel import checksum

    pointers = [p for p in checksum.params if not p.is_constexpr]
    assert [p.name for p in pointers] == ["address_ptr", "place_ptr", "out_ptr"]
    assert all(p.do_not_specialize_on_alignment for p in pointers)
