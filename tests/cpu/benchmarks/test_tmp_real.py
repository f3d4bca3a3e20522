import json
from typer.testing import CliRunner
from benchmarks import workloads, vae
from benchmarks.__main__ import app
REAL = workloads._vae
from conftest import *  # noqa

def test_real(monkeypatch, tmp_path):
    monkeypatch.setattr(workloads, "_vae", REAL)
    monkeypatch.setattr(vae, "RUNS", 2); monkeypatch.setattr(vae, "WARM", 1)
    p = tmp_path/"r.json"
    r = CliRunner().invoke(app, ["vae","--size","64x64","--seconds","0.01","--plans","stock,channels_last,exact","--json",str(p)])
    print(r.output); assert r.exit_code == 0
    for row in json.loads(p.read_text())["rows"]: print(row)

def test_compile(monkeypatch, tmp_path):
    p = tmp_path/"r.json"
    r = CliRunner().invoke(app, ["vae","--size","64x64,32x64","--seconds","0.01","--plans","stock,compile","--json",str(p)])
    print(r.output); assert r.exit_code == 0
    for row in json.loads(p.read_text())["rows"]: print(row)
