"""Scripts of failures of gradients: wrong numbers, shapes and types, inputs written into, several cotangents."""

from __future__ import annotations

import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
from toys import faulty

from veriformer.catalogue import all_laws
from veriformer.law import find_laws
from veriformer.report.script import save, script_of
from veriformer.running import Item

pytest.importorskip("torch")
FAILURES = {
    ("vjp", "attention_vjp_is_short"): "type",
    ("vjp", "layer_norm_vjp_in_float64"): "dtype",
    ("vjp", "softmax_vjp_raises"): "raised",
    ("vjp", "layer_norm_vjp_of_each_row"): "shape",
    ("vjp", "attention_vjp_scales_query_in_place"): "input changed",
    ("attention_backward", "cotangent_overwritten"): "input changed",
    ("attention_backward", "cotangent_viewed"): "raised",
    ("attention_backward", "scale_missing_in_query"): "value",
    ("attention_backward", "lse_gradient_beside_sink"): "value",
    ("attention_backward", "lse_gradient_unscaled"): "value",
    ("universal_gradient", "remainder_detached"): "no influence",
}


def code(path: Path) -> Any:
    """The exit code of a script run in this process, where torch is loaded already."""
    try:
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(path), run_name="__main__")
    finally:
        signal.alarm(0)
    return left.value.code


@pytest.mark.parametrize(("file", "variant"), FAILURES)
def test_a_script_tells_a_wrong_backward_from_a_right_one(file: str, variant: str, tmp_path: Path) -> None:
    one = faulty(file)[variant]
    fault = one.description.fault
    assert fault is not None
    (law,) = find_laws(all_laws(), [fault.law])
    row = Item(law, one, fault.dtype, "ci").run()
    assert row.failure is not None and row.failure.kind == FAILURES[file, variant]
    broken, right = tmp_path / "broken.py", tmp_path / "right.py"
    save(script_of(row, one), broken)
    text = broken.read_text()
    assert f'["{variant}"]' in text
    right.write_text(text.replace(f'["{variant}"]', '["correct"]'))
    assert (code(broken), code(right)) == (1, 0)
