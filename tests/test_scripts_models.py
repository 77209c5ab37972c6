"""Scripts of failures of models: programs of moves, weights given or own, the model that generation is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_scripts import codes, failing, repair, write_script

from veriformer.checking import in_process
from veriformer.targets import Options, load

LIBRARY = """
import numpy as np
BROKEN = True

class Sums:
    \"\"\"Logits are the sum of the table's rows so far; a cache is that sum.\"\"\"

    def __init__(self, table):
        self.table = table

    def full(self, tokens):
        return np.cumsum(self.table[tokens], axis=1)

    def step(self, tokens, cache):
        before = 0 if cache is None else cache * (2 if BROKEN else 1)
        logits = self.full(tokens) + before
        return logits, logits[:, -1:]

    def reorder(self, cache, rows):
        return cache if BROKEN else cache[rows]

def own():
    return Sums(np.random.normal(size=(3, 3)))

def weighted(params, *, heads):
    return Sums(params["embedding"] @ params["embedding"].T)

class Limited(Sums):
    max_length = 3

    def step(self, tokens, cache):
        length = tokens.shape[1] + (0 if cache is None else cache[1])
        if length > self.max_length and not BROKEN:
            raise ValueError("full")
        logits, last = super().step(tokens, None if cache is None else cache[0])
        return logits, (last, length)

    def reorder(self, cache, rows):
        return cache[0][rows], cache[1]

def generate(model, prompt, *, max_length, end=None, pad=0):
    ids = prompt
    while ids.shape[1] < max_length:
        logits = model.full(ids)[:, 0 if BROKEN else -1]
        ids = np.concatenate([ids, logits.argmax(-1)[:, None]], axis=1)
        if end is not None:
            seen = np.cumsum(ids[:, prompt.shape[1]:] == end, axis=1) - (ids[:, prompt.shape[1]:] == end)
            ids[:, prompt.shape[1]:] = np.where(seen > 0, pad, ids[:, prompt.shape[1]:])
    return ids

VARIANTS = {
    "own": {"decoder_lm": own}, "weighted": {"decoder_lm": weighted}, "limited": {"decoder_lm": Limited(np.eye(3))},
    "generate": {"generate": generate},
}
"""
LAWS = {
    "own": "decoder_lm/cache-changes-nothing",
    "weighted": "decoder_lm/any-walk-equals-full",
    "limited": "decoder_lm/past-the-capacity-is-refused",
    "generate": "generate/equals-the-reference",
}

TORCH = """
import torch
BROKEN = True

class Sums(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 3)

    def full(self, tokens):
        return self.embedding(tokens).cumsum(1)

    def step(self, tokens, cache):
        logits = self.full(tokens) + (0 if cache is None else cache * (2 if BROKEN else 1))
        return logits, logits[:, -1:]

decoder_lm = Sums
"""


def test_scripts_of_models_tell_broken_from_fixed(tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    path.write_text(LIBRARY)
    loaded = {one.description.name.partition(":")[2]: in_process(one) for one in load(str(path), Options())}
    scripts = []
    for name, law in LAWS.items():
        row = failing(loaded[name], law)
        assert row.verdict == "fail" and row.failure is not None, f"{name}: {row.verdict} {row.reason}"
        scripts.append(write_script(row, loaded[name], tmp_path / f"{name}.py"))
    assert codes(scripts, tmp_path) == dict.fromkeys(LAWS, 1)
    repair(path)
    assert codes(scripts, tmp_path) == dict.fromkeys(LAWS, 0)


def test_the_script_of_a_torch_model_makes_it_in_the_dtype(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "sums.py"
    path.write_text(TORCH)
    (loaded,) = (in_process(one) for one in load(str(path), Options()))
    row = failing(loaded, "decoder_lm/cache-changes-nothing")
    script = write_script(row, loaded, tmp_path / "own.py")
    assert "torch.set_default_dtype(torch.float32)" in Path(script).read_text()
    assert codes([script], tmp_path) == {"own": 1}
    repair(path)
    assert codes([script], tmp_path) == {"own": 0}
