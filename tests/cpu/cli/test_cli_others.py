from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.broken_rewrites import scaled

COMMANDS = ("generate", "compare", "doctor", "models", "demo")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_a_json_switch(shell: Any, command: str) -> None:
    result = shell(command, "--help")
    assert result.exit_code == 0
    assert f"Example: fusedit {command}" in " ".join(result.stdout.split())
    assert "--json" in result.stdout


def test_help_needs_no_torch() -> None:
    program = (
        "import sys\nsys.argv = ['fusedit', 'compare', '--help']\nfrom fusedit.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version(shell: Any) -> None:
    from fusedit import __version__

    assert shell("--version").stdout == f"fusedit {__version__}\n"


def test_models_lists_every_rewrite(shell: Any) -> None:
    from fusedit.models import registry

    told = shell.json("models")
    assert {model["name"] for model in told["embedded"]} == {"tiny-flux", "tiny-z-image"}
    told_rewrites = {r["name"]: (r["exactness"], r["tier"]) for model in told["supported"] for r in model["rewrites"]}
    assert told_rewrites == {r.name: (r.exactness, r.tier) for model in registry().values() for r in model.rewrites}
    text = shell("models").stdout
    assert all(name in text for name in told_rewrites)


def test_doctor_on_this_machine(shell: Any) -> None:
    told = shell.json("doctor")
    assert told["packages"]["torch"]
    assert [tier["tier"] for tier in told["tiers"]] == ["exact", "fp8"]
    assert told["tiers"][0]["works"]
    assert told["tiers"][1]["works"] or "no products in e4m3" in told["tiers"][1]["reason"]
    assert all(op["works"] for op in told["ops"])
    assert all(op["reason"] for op in told["ops"] if op["backend"] == "plain")
    result = shell("doctor")
    assert result.exit_code == 0
    assert "exact" in result.stdout


def streamed(arguments: tuple[str, ...], kind: str) -> tuple[int, str]:
    """Exit code and standard error of the command line, its standard output full, without a reader, or closed."""
    program = "import sys\nsys.argv[0] = 'fusedit'\nfrom fusedit.cli import main\nmain()"
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    if kind == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "wb") as full:
        out = full if kind == "full" else write if kind == "gone" else None
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    return done.returncode, done.stderr


LAYOUT = ("layout", "--size", "32x16", "--seconds", "0.01", "--what", "decode")
FORKED = """
import json, os, sys, warnings
from fusedit.cli import main
folder, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = "fusedit"
shown = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
try:
    main()  # imports all that the command takes
except SystemExit as stop:
    assert stop.code in (0, None), stop.code
sys.stdout.flush()
codes = {}
read, write = os.pipe()
os.close(read)
for kind, out in (("full", os.open("/dev/full", os.O_WRONLY)), ("gone", write)):
    with warnings.catch_warnings(action="ignore"):  # newer Pythons warn of threads, of which torch has none here
        child = os.fork()
    if not child:
        os.dup2(out, 1)
        os.dup2(os.open(f"{folder}/{kind}", os.O_WRONLY | os.O_CREAT), 2)
        break
    codes[kind] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    os.write(shown, json.dumps(codes).encode())
    sys.exit()
main()
"""


def streamed_at_once(arguments: tuple[str, ...], folder: Path) -> dict[str, tuple[int, str]]:
    """The same for a command that imports for ten seconds: two processes that fork behind the imports, full and gone.

    Each runs the whole command and ends as Python ends, with its own standard output and error.
    """
    command = [sys.executable, "-W", "error", "-c", FORKED, str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {kind: (code, (folder / kind).read_text()) for kind, code in json.loads(done.stdout).items()}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [("models",), ("models", "--json"), ("--help",), ("--version",), LAYOUT, (*LAYOUT, "--json")],
    ids=lambda arguments: "-".join((arguments[0].strip("-"), *arguments[-1:])),
)
def test_a_full_disk_and_a_reader_that_has_gone(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Neither is exit code 1, which says that a gate failed, nor a defect."""
    if arguments[0] == "layout":
        told = streamed_at_once(arguments, tmp_path)
    else:
        told = {kind: streamed(arguments, kind) for kind in ("full", "gone")}
    assert told["full"] == (2, "fusedit: standard output cannot be written: No space left on device\n")
    assert told["gone"] == (141, "")
    assert streamed(arguments, "closed") == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_error_with_json_on_a_full_disk() -> None:
    code, said = streamed(("layout", "--batch", "0", "--json"), "full")
    assert (code, said.splitlines()[0]) == (2, "fusedit: standard output cannot be written: No space left on device")
    code, said = streamed(("layout", "--batch", "0", "--json"), "gone")
    assert (code, said) == (141, "")


SIGNALLED = """
import os, sys
from diffusers import AutoencoderKL
from fusedit.cli import main
number, *sys.argv[1:] = map(str, sys.argv[1:])
stock = AutoencoderKL.save_pretrained
def signalled(self, place, *args, **kwargs):
    stock(self, place, *args, **kwargs)
    assert ".part" in str(place) and os.listdir(place)
    os.kill(os.getpid(), int(number))
AutoencoderKL.save_pretrained = signalled
main()
"""


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_while_files_are_written_leaves_none(
    number: int, code: int, word: str, models: dict[str, Path], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": 1, "base": "fp8", "rewrites": {"flux.fp8_rounding": False}}))
    arguments = (str(models["tiny-flux"]), "--plan", str(plan), "-o", str(tmp_path / "made"))
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), "quantize", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.splitlines()[-1] == f"fusedit: {word}"
    assert list(tmp_path.iterdir()) == [plan]


def doctor_beside(folder: Path) -> Any:
    """What doctor says in a process of its own whose import path begins with this folder."""
    source = Path(__file__).resolve().parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-m", "fusedit", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{folder}:{source}"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BROKEN = {
    "import_error": "raise ImportError('undefined symbol: _ZN3c10')",
    "os_error": "raise OSError('libcudart.so.99: cannot open shared object file')",
    "no_attributes": "",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_neighbours_break_nothing_and_are_named(kind: str, tmp_path: Path) -> None:
    # VER-01: import, drawing and doctor work with a broken flash_attn or pynvml; doctor names it.
    for name in ("flash_attn", "pynvml"):
        (tmp_path / f"{name}.py").write_text(BROKEN[kind])
    told = doctor_beside(tmp_path)
    assert told["cuda"]["driver"] is None
    if kind == "os_error":  # torch itself cannot be imported beside such a pynvml, and doctor says so
        assert "libcudart.so.99" in told["cuda"]["reason"]
    named = [conflict["package"] for conflict in told["conflicts"]]
    assert ("flash_attn" in named) == (kind != "no_attributes")
    if kind != "no_attributes":
        assert not next(row for row in told["optional"] if row["package"] == "pynvml")["works"]


def test_an_old_torchao_is_named(tmp_path: Path) -> None:
    # VER-02
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("")
    (tmp_path / "torchao-0.10.0.dist-info").mkdir()
    (tmp_path / "torchao-0.10.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchao\nVersion: 0.10.0\n"
    )
    conflicts = {c["package"]: c["problem"] for c in doctor_beside(tmp_path)["conflicts"]}
    assert "0.10.0" in conflicts["torchao"]


@pytest.mark.parametrize("part", ["fusedit.models", "fusedit.ops", "torch"])
def test_doctor_survives_what_it_examines(part: str, shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit import doctor

    real = doctor.import_module

    def fails(name: str) -> Any:
        if name == part:
            raise RuntimeError("broken on purpose")
        return real(name)

    monkeypatch.setattr(doctor, "import_module", fails)
    told = shell.json("doctor")
    assert "broken on purpose" in json.dumps(told)
    assert shell("doctor").exit_code == 0


def test_the_demo(shell: Any, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedit import defaults, demo
    from fusedit.validation import Size

    broken.effects = {"stub.gentle": scaled(1 + 1e-6)}
    small = {name: defaults.Defaults(Size(32, 32), 1, 1.0) for name in defaults.MODELS}
    monkeypatch.setattr(defaults, "MODELS", small)
    result = shell("demo")
    assert result.exit_code == 0, result.output
    assert "per step" in result.stdout
    assert "tiny-z-image" in result.stdout
    told = json.loads((shell.folder / "out/demo/result.json").read_text())
    assert [entry["model"] for entry in told["results"]] == ["tiny-flux", "tiny-z-image"]
    assert all(len(entry["pairs"]) == len(demo.PROMPTS) for entry in told["results"])
    page = (shell.folder / "out/demo/report.html").read_text()
    assert page.count("<section>") == 2
    assert page.count("<article>") == 2 * len(demo.PROMPTS)


def test_the_demo_checks_its_folder_first(shell: Any) -> None:
    (shell.folder / "taken").write_text("")
    assert "taken" in shell.refused("demo", "--out", "taken")
