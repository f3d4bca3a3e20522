"""What a user sees: the public names, and an import that costs nothing."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import fusedit
from fusedit import errors


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_import_is_light_and_silent() -> None:
    heavy = "{'torch', 'triton', 'diffusers', 'transformers', 'numpy', 'rich', 'typer', 'pynvml'}"
    assert run(f"import sys, fusedit\nassert not {heavy} & set(sys.modules)") == ""


def test_the_public_names_come_without_a_gpu_being_touched() -> None:
    program = (
        "import fusedit, torch\nfusedit.accelerate, fusedit.load, fusedit.compare, fusedit.Plan, fusedit.Handle\n"
        "assert not torch.cuda.is_initialized()"
    )
    run(program)


def test_all_is_what_is_visible() -> None:
    for name in fusedit.__all__:
        assert getattr(fusedit, name) is not None
    visible = {
        name
        for name in dir(fusedit)
        if not name.startswith("_") and not isinstance(getattr(fusedit, name), types.ModuleType)
    }
    assert visible - {"annotations", "import_module", "TYPE_CHECKING", "Any"} <= set(fusedit.__all__)
    assert set(fusedit.__all__) <= set(dir(fusedit))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="accelerator"):
        fusedit.accelerator  # noqa: B018


def test_every_error_is_in_the_tree_and_in_its_drawing() -> None:
    own = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(own) > 8
    for error in own:
        assert issubclass(error, errors.FuseditError)
        assert error.__name__ in (errors.__doc__ or "")
