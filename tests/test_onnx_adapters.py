"""The adapters of ONNX at a look: what holds holds, what is known to fail fails, and findings are still there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from veriformer import cli

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
FINDINGS = Path(__file__).parent.parent / "reports" / "findings"


@pytest.mark.parametrize(
    "words",
    [
        ("onnx:lengths", "--law", "cached_attention"),
        ("onnx:attention", "--law", "attention/equals-the-reference"),
        ("onnx:default", "--law", "log_softmax"),
        ("onnxruntime:default", "--law", "logsumexp"),
        ("onnxruntime:exported_optimised", "--law", "layer_norm"),
    ],
)
def test_a_look_is_as_declared(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", *words, "--effort", "look", "--dtype", "float32", "--output", str(tmp_path)])
    assert ended.value.code == 0


@pytest.mark.parametrize("name", ["onnx_reference_causal_mask_row", "onnxruntime_logsumexp_low_rows"])
def test_findings_stand_alone(name: str) -> None:
    ended = subprocess.run([sys.executable, str(FINDINGS / f"{name}.py")], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stdout.startswith("got"), ended.stderr
