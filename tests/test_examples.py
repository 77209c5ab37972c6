"""The examples of docs/examples: each is right, and a copy with one line changed is not."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from toys import ROOT, run_python

EXAMPLES = ROOT / "docs" / "examples"


@dataclass(frozen=True)
class Example:
    """How an example is checked, and the change that makes it wrong. needs: packages. made: run it first."""

    target: str
    laws: str
    right: str
    wrong: str
    needs: tuple[str, ...] = ()
    made: bool = False


ATTENTION = "attention/equals-the-reference,attention/causal-is-the-end-of-the-square,attention/future-has-no-influence"
SHIFT = ("scores.shape[-1] - scores.shape[-2]", "0")
FILES = {
    "bare_function.py": Example("attention={}:attention", ATTENTION, *SHIFT),
    "subprocess_python.py": Example(f"attention=subprocess:{sys.executable} {{}}", ATTENTION, *SHIFT),
    "subprocess_node.mjs": Example("attention=subprocess:node {}", ATTENTION, "j > i + Tk - Tq", "j > i"),
    "jax_function.py": Example("attention={}:attention", ATTENTION, *SHIFT, ("jax",)),
    "module_factory.py": Example(
        "multi_head_attention={}:multi_head_attention",
        "multi_head_attention/equals-the-reference,multi_head_attention/heads-add-up",
        ".tril(last)", ".tril()", ("torch",),
    ),
    "onnx_file.py": Example("softmax=kernel.onnx", "softmax/equals-the-reference", "axis=-1", "axis=0",
                            ("onnx", "onnxruntime"), True),
    "hugging_face.py": Example(
        "decoder_lm={}:model", "decoder_lm/cache-changes-nothing",
        "LlamaForCausalLM(config).eval()",
        "LlamaForCausalLM(config).eval(); model.register_forward_pre_hook("
        "lambda m, a, w: (a, w | {'input_ids': w['input_ids'].flip(1)}), with_kwargs=True)",
        ("torch", "transformers"),
    ),
}  # fmt: skip


def checked(name: str, folder: Path) -> tuple[int, str]:
    """The exit code of a short check of an example in a folder, and what it printed."""
    example = FILES[name]
    if example.made:
        made = run_python(name, folder=folder)
        assert made.returncode == 0, made.stderr
    words = ["check", example.target.format(name), "--effort", "look", "--dtype", "main", "--law", example.laws]
    done = run_python("-m", "veriformer", *words, folder=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_right_and_a_changed_copy_is_not(name: str, tmp_path: Path) -> None:
    example = FILES[name]
    if not all(find_spec(package) for package in example.needs) or name.endswith(".mjs") and not shutil.which("node"):
        pytest.skip(f"needs {', '.join(example.needs) or 'node'}")
    text = (EXAMPLES / name).read_text()
    (tmp_path / name).write_text(text)
    code, said = checked(name, tmp_path)
    assert code == 0, said
    assert text.count(example.right) == 1
    (tmp_path / name).write_text(text.replace(example.right, example.wrong))
    code, said = checked(name, tmp_path)
    assert code == 1, said


def test_every_example_is_tested_and_says_how_it_is_checked() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert names == set(FILES)
    for name in names:
        assert "veriformer check " in (EXAMPLES / name).read_text(), name
