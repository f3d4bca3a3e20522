from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

STEM = "lora_unet_double_blocks_0_img_attn_qkv"


def kohya(folder: Path) -> str:
    path = folder / "style.safetensors"
    tensors = {f"{STEM}.lora_down.weight": torch.ones(2, 32), f"{STEM}.lora_up.weight": torch.ones(96, 2)}
    tensors |= {f"{STEM}.alpha": torch.tensor(1.0), "lora_unet_nothing.alpha": torch.tensor(1.0)}
    save_file(tensors, path)
    return str(path)


def test_inspect_prints_what_is_in_a_file(shell: Any) -> None:
    result = shell("lora", "inspect", kohya(shell.folder))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "format   kohya, 4 keys",
        "model    FLUX.1",
        "transformer: 3 layers, 0.0 MiB",
        "  rank   2",
        "  alpha  1; scale 0.5",
        "     1 x transformer_blocks.*.attn.to_q",
        "     1 x transformer_blocks.*.attn.to_k",
        "     1 x transformer_blocks.*.attn.to_v",
        "unmatched keys (1): lora_unet_nothing.alpha",
    ]


def test_inspect_as_json(shell: Any) -> None:
    file = kohya(shell.folder)
    told = shell.json("lora", "inspect", file)
    assert (told["file"], told["format"], told["family"], told["keys"]) == (file, "kohya", "flux", 4)
    assert told["parts"]["transformer"]["alphas"] == {"1": 3}
    assert told["unmatched"] == ["lora_unet_nothing.alpha"]


def test_a_file_that_cannot_be_read(shell: Any) -> None:
    assert "'no.safetensors' does not exist" in shell.refused("lora", "inspect", "no.safetensors")
    (shell.folder / "lora.ckpt").write_bytes(b"PK\x03\x04")
    assert "is a pickle" in shell.refused("lora", "inspect", str(shell.folder / "lora.ckpt"))
    error = shell.json("lora", "inspect", "no.safetensors", code=2)["error"]
    assert error["type"] == "LoraError"


def test_help_has_an_example(shell: Any) -> None:
    result = shell("lora", "inspect", "--help")
    assert "Example: fusedit lora inspect" in " ".join(result.stdout.split())


def test_inspecting_imports_neither_diffusers_nor_peft(shell: Any) -> None:
    program = (
        "import sys\nfrom fusedit import lora\nlora.inspect(lora.read(sys.argv[1]))\n"
        "assert not {'diffusers', 'peft', 'transformers', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, kohya(shell.folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
