"""JAX as a framework: what crosses the boundary, gradients, crashes, scripts.

Calls are made in workers: a process in which JAX has calculated must not be forked, and other tests do that.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from test_scripts import failing, write_script  # noqa: E402
from toys import run_python  # noqa: E402

from veriformer.boundary import Outcome, Request  # noqa: E402
from veriformer.isolate import Remote  # noqa: E402
from veriformer.subject import Implementation  # noqa: E402
from veriformer.targets import Options  # noqa: E402
from veriformer.written_in import framework_of  # noqa: E402

LIBRARY = """
import functools
import os
import jax
import jax.numpy as jnp
import numpy as np

BROKEN = True

@jax.jit
def softmax(x):
    return jax.nn.softmax(x, axis=-1)

def hostile(x):
    if x.shape == (2,):
        os.abort()
    while x.shape == (3,):
        pass
    return softmax(x)

def aborts(x):
    os.abort()

def donates(x):
    return jax.jit(lambda x: x + 1, donate_argnums=0)(x)

def narrows(x):
    jax.config.update("jax_enable_x64", False)
    return jnp.exp(x) / jnp.sum(jnp.exp(x))

@functools.partial(jax.jit, static_argnames="causal")
def attention(q, k, v, *, mask=None, causal=False):
    last = k.shape[2] - 1 if BROKEN else k.shape[2]
    hide = jnp.zeros((q.shape[2], last), bool) if mask is None else ~mask[..., :last]
    logits = q @ jnp.swapaxes(k[:, :, :last], -1, -2) * q.shape[-1] ** -0.5
    if causal:
        hide = hide | (jnp.arange(last) > jnp.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2])
    return jax.nn.softmax(jnp.where(hide, -jnp.inf, logits), axis=-1) @ v[:, :, :last]

def rms_norm(x, weight, *, eps=1e-6):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight

@jax.custom_vjp
def doubled(x):
    return jax.nn.log_softmax(x, axis=-1)

def forward(x):
    out = jax.nn.log_softmax(x, axis=-1)
    return out, out

def backward(out, grad):
    return (grad - jnp.exp(out) * jnp.sum(grad, axis=-1, keepdims=True) * (2 if BROKEN else 1),)

doubled.defvjp(forward, backward)

@functools.partial(jax.jit, static_argnames="heads")
def multi_head_attention(x, memory, params, *, heads):
    rows = lambda a, w: jnp.swapaxes((a @ params[w]).reshape(*a.shape[:2], heads, -1), 1, 2)
    q, k, v = rows(x, "wq"), rows(memory, "wk"), rows(memory, "wv")
    weights = jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5, axis=-1)
    return jnp.swapaxes(weights @ v, 1, 2).reshape(*x.shape[:2], -1) @ params["wo"]

def act_loop(step, state, *, max_steps, epsilon=0.01):
    output, total, steps, rest = state * 0, 0 * state[..., 0], 0 * state[..., 0], 0 * state[..., 0]
    for n in range(1, max_steps + 1):
        state, h = step(state, n)
        running = total < 1 - epsilon
        last = running & ((total + h >= 1 - epsilon) | (n == max_steps))
        weight = running * (last * (1 - total) + ~last * h)
        output, rest = output + weight[..., None] * state, rest + last * (1 - total)
        total, steps = total + running * h, steps + running
    return output, steps.astype(int), rest

def numpys(x):
    return jnp.asarray(np.asarray(x))

VARIANTS = {
    "whole": {"softmax": softmax, "attention": attention, "rms_norm": rms_norm, "act_loop": act_loop,
              "multi_head_attention": multi_head_attention, "log_softmax": doubled},
    "hostile": {"softmax": hostile}, "aborts": {"softmax": aborts}, "donates": {"softmax": donates},
    "narrows": {"softmax": narrows}, "numpys": {"softmax": numpys},
}
"""
STEP = {
    "state": np.array([[1.0], [2.0]]),
    "step.drive": np.ones((2, 3, 1)),
    "step.halting": np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]),
}


def library(folder: Path, text: str = LIBRARY) -> Path:
    path = folder / "jax_lib.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    one = Remote(str(library(tmp_path_factory.mktemp("jax"))), Options())
    yield one
    one.close()


def call(remote: Remote, operation: str, arrays: dict[str, Any], variant: str = "whole", **words: Any) -> Outcome:
    request = Request(arrays, words.pop("keywords", {}), words.pop("dtype", "float32"), **words)
    return remote.call(f"{remote.target}:{variant}", operation, request)


def test_the_target_is_known_as_jax_and_children_are_forks(remote: Remote) -> None:
    about = remote.descriptions[0]
    assert about.framework == "jax" and about.versions["jax"] == jax.__version__ and not remote.imports


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_every_dtype_goes_in_and_comes_out(remote: Remote, dtype: str) -> None:
    x = np.array([0.0, 1.0, 2.0])
    outcome = call(remote, "softmax", {"x": x}, dtype=dtype, watch=True)
    wanted, unit = np.exp(x) / np.exp(x).sum(), {"float64": 1e-15, "float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}
    assert (outcome.kind, outcome.dtypes) == ("ok", (dtype,)), outcome.message
    assert not (outcome.changed or outcome.aliased or outcome.state or outcome.stale)
    np.testing.assert_allclose(outcome.results[0], wanted, rtol=unit[dtype])


def test_gradients_are_those_of_the_closed_form(remote: Remote) -> None:
    x, g = np.array([0.0, 1.0, 2.0]), np.array([1.0, -2.0, 0.5])
    outcome = call(remote, "softmax", {"x": x}, dtype="float64", gradient=("x",), cotangents=(g,))
    y = np.exp(x) / np.exp(x).sum()
    np.testing.assert_allclose(outcome.gradients["x"], y * (g - g @ y), rtol=1e-14)  # type: ignore[arg-type]
    assert outcome.gradient_dtypes == {"x": "float64"}


def test_gradients_by_weights_are_those_of_torch(remote: Remote) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    shapes = {"x": (2, 3, 4), "memory": (2, 5, 4), **{f"params.{name}": (4, 4) for name in ("wq", "wk", "wv", "wo")}}
    arrays = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    words: dict[str, Any] = {"dtype": "float64", "gradient": tuple(arrays), "keywords": {"heads": 2}}
    outcome = call(remote, "multi_head_attention", arrays, cotangents=(arrays["x"],), **words)
    assert outcome.kind == "ok", outcome.message
    x, memory, wq, wk, wv, wo = tensors = [torch.tensor(array, requires_grad=True) for array in arrays.values()]
    q, k, v = ((a @ w).reshape(*a.shape[:2], 2, 2).transpose(1, 2) for a, w in ((x, wq), (memory, wk), (memory, wv)))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape) @ wo
    out.backward(torch.tensor(arrays["x"]))
    for name, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_allclose(outcome.gradients[name], tensor.grad.numpy(), rtol=1e-10)  # type: ignore[arg-type]


def test_gradients_reach_what_a_given_step_is_made_of(remote: Remote) -> None:
    cotangents, words = (np.ones((2, 1)), None, None), {"max_steps": 3}
    outcome = call(remote, "act_loop", STEP, keywords=words, gradient=tuple(STEP), cotangents=cotangents)
    assert (outcome.kind, outcome.dtypes) == ("ok", ("float32", "int64", "float32")), outcome.message
    assert outcome.results[1].tolist() == [2, 1]
    assert outcome.gradients["step.drive"][1].ravel().tolist() == [1, 0, 0]  # type: ignore[index]


def test_a_function_that_leaves_jax_has_no_gradient_and_says_why(remote: Remote) -> None:
    assert call(remote, "softmax", {"x": np.ones(4)}, "numpys").kind == "ok"
    outcome = call(remote, "softmax", {"x": np.ones(4)}, "numpys", gradient=("x",), cotangents=(np.ones(4),))
    assert outcome.kind == "refused" and "TracerArrayConversionError" in outcome.message


def test_a_donated_input_counts_as_changed_and_options_as_global_state(remote: Remote) -> None:
    assert call(remote, "softmax", {"x": np.ones(4)}, "donates", watch=True).changed == ("x",)
    assert call(remote, "softmax", {"x": np.ones(4)}, "narrows", watch=True).state == ("jax's x64 mode",)
    assert call(remote, "softmax", {"x": np.ones(4)}, dtype="float64").dtypes == ("float64",)


@pytest.mark.parametrize("computes", ["", "START = jnp.ones(3)\n"])
def test_a_crash_and_a_hang_cost_one_outcome(tmp_path: Path, computes: str) -> None:
    path = library(tmp_path, LIBRARY + computes)
    one = Remote(f"{path}:hostile", Options(), 2.0)
    assert one.imports == bool(computes)
    found = [one.call(f"{path}:hostile", "softmax", Request({"x": np.ones(n)}, {}, "float32")) for n in (2, 3)]
    one.patience, one.hung = 60.0, False
    found.append(one.call(f"{path}:hostile", "softmax", Request({"x": np.ones(4)}, {}, "float32")))
    one.close()
    assert [outcome.kind for outcome in found] == ["crash", "timeout", "ok"], found
    assert "SIGABRT" in found[0].message


SCRIPTS = {
    "attention/equals-the-reference": "float32",
    "attention/gradient-equals-the-reference": "bfloat16",
    "log_softmax/gradient-equals-the-reference": "float64",
}


def test_scripts_tell_broken_from_mended(tmp_path: Path) -> None:
    path = library(tmp_path)
    remote, scripts = Remote(f"{path}:whole", Options()), []
    one = Implementation(remote.descriptions[0], remote.call, str(path))
    for number, (law, dtype) in enumerate(SCRIPTS.items()):
        row = failing(one, law, dtype)
        assert row.failure is not None, f"{law}: {row.verdict} {row.reason}"
        scripts.append(write_script(row, one, tmp_path / f"script{number}.py"))
    remote.close()
    text = Path(scripts[0]).read_text()
    assert "import jax" in text and "jnp.array(" in text and "torch" not in text and "veriformer" not in text
    assert [run_python(script, folder=tmp_path).returncode for script in scripts] == [1, 1, 1]
    path.write_text(path.read_text().replace("BROKEN = True", "BROKEN = False"))
    done = [run_python(script, folder=tmp_path) for script in scripts]
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * 3


def test_a_script_for_a_call_that_ends_the_process(tmp_path: Path) -> None:
    path = library(tmp_path)
    remote = Remote(f"{path}:aborts", Options())
    one = Implementation(remote.descriptions[0], remote.call, f"{path}:aborts")
    row = failing(one, "softmax/returns-an-array")
    remote.close()
    assert row.verdict == "crash"
    script = write_script(row, one, tmp_path / "script.py")
    assert run_python(script, folder=tmp_path).returncode == 1
    mended = path.read_text().replace("os.abort()", "return softmax(x)")
    path.write_text(mended + "START = jnp.ones(3)\n")  # what must not be forked
    assert run_python(script, folder=tmp_path).returncode == 0


def test_a_function_of_jax_is_recognized() -> None:
    module = types.ModuleType("my_jax")
    source = "import jax\nimport jax.numpy as jnp\nimport numpy as np\njitted = jax.jit(lambda x: x)\n"
    source += "def one(x): return jnp.exp(x)\ndef two(x): return jitted(x)\ndef three(x): return np.exp(x)\n"
    exec(source, vars(module))
    scope = vars(module)
    found = [framework_of(scope[name], module) for name in ("one", "two", "three", "jitted")]
    assert found == ["jax", "jax", "numpy", "jax"]
    for function in (jax.nn.softmax, jax.nn.relu, jax.jit(jax.nn.gelu), functools.partial(jax.nn.softmax, axis=0)):
        assert framework_of(function, sys.modules[__name__]) == "jax"


MEMORY = """
import jax
import veriformer
report = veriformer.check(softmax=jax.nn.softmax, laws="softmax/sums-to-one", dtypes="float64", effort="look")
print(report.implementations[0].description.framework, report.exit_code)
"""


def test_a_function_in_memory(tmp_path: Path) -> None:
    done = run_python("-c", MEMORY, folder=tmp_path)
    assert done.stdout.split() == ["jax", "0"], done.stdout + done.stderr
