"""What somebody meets in the first minutes: odd targets, odd functions, odd places to call from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from veriformer.calling import UsageError, plan_call
from veriformer.checking import check
from veriformer.targets import Options, load, load_functions
from veriformer.written_in import framework_of

SOFTMAX = "import numpy as np\n\ndef softmax(x, *, axis=-1):\n    e = np.exp(x - x.max(axis, keepdims=True))\n"
SOFTMAX += "    return e / e.sum(axis, keepdims=True)\n"


def test_a_script_that_checks_itself_without_a_guard_ends_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(f"{SOFTMAX}\nimport veriformer\nveriformer.check('softmax=own.py:softmax', effort='smoke')\n")
    done = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "put that call under `if __name__ == '__main__':`" in done.stderr


def test_a_file_inside_a_package_is_imported_as_part_of_it(tmp_path: Path) -> None:
    inner = tmp_path / "outer_package" / "sub"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner / "plain.py").write_text(SOFTMAX)
    (inner / "core.py").write_text("from .plain import softmax\n")
    (loaded,) = load(f"softmax={inner}/core.py:softmax", Options())
    assert loaded.boundaries["softmax"].function(np.zeros(2)).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("softmax={0}/own.py:Class", "is a class; name a function, or an instance"),
        ("{0}/own.py:softmax", "for a function of it write OPERATION={0}/own.py:softmax"),
        ("{0}", "is a folder; name a file in it"),
    ],
)
def test_targets_that_name_the_wrong_thing_say_so(tmp_path: Path, target: str, words: str) -> None:
    (tmp_path / "own.py").write_text(f"{SOFTMAX}\nclass Class: pass\n")
    with pytest.raises(UsageError) as caught:
        load(target.format(tmp_path), Options())
    assert words.format(tmp_path) in str(caught.value)


def test_what_is_no_function_is_named() -> None:
    with pytest.raises(UsageError, match="softmax is a int, wanted something that can be called"):
        load_functions({"softmax": 3}, Options())  # type: ignore[dict-item]


def numpy_one(x: Any) -> Any:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def test_the_framework_is_the_one_that_the_function_uses() -> None:
    torch = pytest.importorskip("torch")
    source = "import numpy as np\nimport torch\ndef one(x): return np.exp(x)\ndef two(x): return torch.exp(x)\n"
    source += "def three(x): return two(x)\ndef four(x): return x.exp()\n"
    scope: dict[str, Any] = {"__name__": "mixed"}
    exec(source, scope)
    module = type(sys)("mixed")
    found = [framework_of(scope[name], module) for name in ("one", "two", "three", "four")]
    assert found == ["numpy", "torch", "torch", "torch"]
    assert (
        framework_of(torch.nn.LayerNorm(4), module) == "torch"
        and framework_of(numpy_one, sys.modules[__name__]) == "numpy"
    )


def test_a_module_of_torch_is_read_through_its_forward() -> None:
    torch = pytest.importorskip("torch")

    class Attention(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
            return q

    assert plan_call(Attention(), "attention").keywords == {"causal": "is_causal"}


def test_functions_in_memory_are_called_in_this_process() -> None:
    report = check(softmax=numpy_one, effort="smoke", laws=["softmax/sums-to-one"], dtypes=["float32"])
    assert report.settings.isolate is False and len(report.rows) == 1
