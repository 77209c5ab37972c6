"""Where tensors are: `--device`, the capability `devices`, and what a failure on a device leaves behind.

cpu:0 stands for a device other than the default one: torch takes it everywhere, and no GPU is needed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from veriformer.calling import UsageError
from veriformer.checking import check
from veriformer.cli import installed, main
from veriformer.declarations import Expected
from veriformer.frameworks import framework_named
from veriformer.known import awake
from veriformer.targets import Options, load

torch = pytest.importorskip("torch")
CUDA = torch.cuda.is_available()

TWO_DEVICES = """
import torch
from veriformer.declarations import Capabilities

FRAMEWORK = "torch"

def softmax(x, *, axis=-1, temperature=1.0):
    return (x / temperature).softmax(axis)

def relu(x):
    return x.relu() + 1

CAPABILITIES = {"softmax": Capabilities(devices=("cuda",))}
"""


def written(folder: Path, only_softmax: bool = False) -> str:
    source = TWO_DEVICES.replace("def relu", "def _relu") if only_softmax else TWO_DEVICES
    path = folder / "two.py"
    path.write_text(source)
    return str(path)


def code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_tensors_are_made_on_the_device():
    framework = framework_named("torch", "meta")
    for values in (np.ones((2, 3)), np.ones(3, bool), np.arange(3)):
        assert framework.native(values, "float32").device.type == "meta"
    assert framework.native(np.ones((2, 3)), "float32", "offset").device.type == "meta"
    assert framework.native(np.ones((2, 3)), "float32", "expanded").device.type == "meta"
    assert framework_named("torch").native(np.ones(2), "float32").device.type == "cpu"


def test_a_device_that_is_not_there_is_one_line(capsys):
    for device, target in (("toaster", "torch"), ("cuda", "numpy"), *([] if CUDA else [("cuda", "torch")])):
        with pytest.raises(UsageError, match=device) as error:
            load(target, Options(device=device))
        assert "\n" not in str(error.value)


@pytest.mark.skipif(CUDA, reason="there is a GPU")
def test_the_command_ends_with_usage(capsys):
    assert code_of("check", "torch", "--device", "cuda") == 2
    assert "cannot use it here" in capsys.readouterr().err


def test_operations_of_another_device_are_left_out(tmp_path):
    (one,) = load(written(tmp_path), Options())
    assert list(one.boundaries) == ["relu"] and list(one.description.plans) == ["relu"]


def test_a_target_of_another_device_alone_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="works on cuda, not on cpu: add --device cuda"):
        load(written(tmp_path, only_softmax=True), Options())


def test_defaults_on_a_device_are_those_that_can_be_there():
    assert installed(("numpy", "torch")) == ["numpy", "torch"]
    assert installed(("numpy", "torch"), "cuda") == ["torch"]


def test_an_expected_failure_sleeps_on_another_device():
    entry = Expected("softmax/x", reason="the CPU's kernel", when={"device": "cpu"})
    assert awake(entry, "float32", {"torch": "2.13.0"})
    assert not awake(entry, "float32", {"torch": "2.13.0", "device": "cuda:0, NVIDIA H200"})
    assert awake(Expected("softmax/x", reason="a", when={"device": "cuda, hip"}), "float32", {"device": "cuda:1"})


def test_the_script_of_a_failure_makes_its_tensors_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = written(tmp_path)
    report = check(f"relu={target}:relu", device="cpu:0", dtypes="float32", laws="equals-the-reference")
    assert [row.verdict for row in report.failures] == ["fail"]
    words = ("--device", "cpu:0", "--dtype", "float32", "--effort", "smoke")
    assert code_of("check", f"relu={target}:relu", *words) == 1
    scripts = sorted(Path(".veriformer").glob("equals-the-reference-*.py"))
    assert scripts and "device='cpu:0'" in scripts[0].read_text()
    ended = subprocess.run([sys.executable, scripts[0]], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "wanted" in ended.stdout, ended
    assert code_of("replay", scripts[0].stem.rpartition("-")[2]) == 1
