"""Our layers, stacks and encoder-decoders against the reference, and the paths that torch takes."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from reference_models import close, converted, random_layer, random_transformer

from veriformer import reference

LAYERED = ("encoder_layer", "decoder_layer", "encoder", "decoder")
SIGHTS = ({}, {"positions": "rotary"}, {"positions": "alibi", "window": (1, 0)}, {"window": (None, 1)})
SHAPES = {"each": (2, 4, 3, 3), "keys": (2, 1, 1, 3), "square": (1, 1, 3, 3)}


def load(name: str) -> Any:
    if name.startswith("torch"):
        pytest.importorskip("torch")
    return importlib.import_module(f"veriformer.impls.{name}")


def weights(operation: str, *, groups: int = 2, bare: bool = False) -> Any:
    """A layer, or two of them with a final norm; bare: without biases, and hence with rms norms."""

    def layer(seed: int) -> Any:
        params = random_layer(seed, cross=operation.startswith("decoder"), groups=groups)
        return {part: {n: a for n, a in w.items() if not bare or n[0] != "b"} for part, w in params.items()}

    if operation.endswith("layer"):
        return layer(0)
    return {"layers": [layer(1), layer(2)], "norm": layer(3)["norm1"]}


def inputs(operation: str) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 4, 8))]
    return arrays if operation.startswith("decoder") else arrays[:1]


def masks(operation: str, kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Of one shape; every query sees its own position and the first one."""
    if not kind:
        return {}
    rng = np.random.default_rng(seed)
    mask = (rng.random(SHAPES[kind]) < 0.6) | (np.arange(3) == 0) | np.eye(3, dtype=bool)[-SHAPES[kind][2] :]
    found = {"mask": mask}
    if operation.startswith("decoder"):
        found["memory_mask"] = (rng.random((*SHAPES[kind][:3], 4)) < 0.6) | (np.arange(4) == 1)
    return found


def as_torch(tree: Any) -> Any:
    import torch

    return converted(torch.tensor, tree)


def calls(operation: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Weights and keywords: every two dialects of norms, positions and windows together, with each kind of mask."""
    kinds = itertools.cycle(("", "each", "keys"))
    for norm, bare, sight in itertools.product(("post", "pre"), (False, True), SIGHTS):
        yield (
            weights(operation, bare=bare),
            {"heads": 4, "norm": norm, "alpha": 1.5, **sight, **masks(operation, next(kinds))},
        )


@pytest.mark.parametrize("operation", LAYERED)
@pytest.mark.parametrize("name", ["numpy_transformer", "torch_layers"])
def test_layers_and_stacks_equal_the_reference_in_every_dialect(name: str, operation: str) -> None:
    module, arrays = load(name), inputs(operation)
    convert = as_torch if module.FRAMEWORK == "torch" else lambda tree: tree
    for params, words in calls(operation):
        wanted = getattr(reference, operation)(*arrays, params, **words)
        got = vars(module)[operation](*convert(arrays), convert(params), **convert(words))
        close(got, wanted)


@pytest.mark.parametrize("name", ["numpy_transformer", "torch_layers"])
def test_the_encoder_decoder_equals_the_reference(name: str) -> None:
    module, rng = load(name), np.random.default_rng(0)
    convert = as_torch if module.FRAMEWORK == "torch" else lambda tree: tree
    tokens = [rng.integers(0, 7, shape) for shape in ((2, 4), (2, 3))]
    for positions, mask, tied in itertools.product(
        (None, "sinusoidal", "rotary", "alibi"), (False, True), (False, True)
    ):
        params = random_transformer(norm="pre") | ({} if tied else {"embedding_scale": np.array(2.0)})
        params = params if tied else params | {"head": {"w": rng.normal(size=(8, 5)), "b": rng.normal(size=5)}}
        words = {"heads": 4, "norm": "pre" if tied else "post", "alpha": (0.5, 2.0), "positions": positions}
        words |= {"mask": rng.random((2, 4)) < 0.7} if mask else {}
        wanted = reference.transformer(*tokens, params, **words)
        close(module.transformer(*convert(tokens), convert(params), **convert(words)), wanted)


@pytest.mark.parametrize("operation", LAYERED)
def test_unknown_dialects_are_refused(operation: str) -> None:
    for name in ("numpy_transformer", "torch_layers"):
        module = load(name)
        convert = as_torch if module.FRAMEWORK == "torch" else lambda tree: tree
        arrays, params = convert(inputs(operation)), convert(weights(operation))
        for words in ({"norm": "sandwich"}, {"positions": "sinusoidal"}):
            with pytest.raises(ValueError, match=next(iter(words))):
                vars(module)[operation](*arrays, params, heads=4, **words)


Spy = Callable[[str], list[Any]]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """The first arguments of all later calls of a function of torch, by its name."""
    torch = pytest.importorskip("torch")

    def watch(name: str) -> list[Any]:
        seen: list[Any] = []
        function = getattr(torch, name)

        def wrapped(x: Any, *rest: Any, **words: Any) -> Any:
            seen.append(x)
            return function(x, *rest, **words)

        monkeypatch.setattr(torch, name, wrapped)
        return seen

    return watch


FUSED, FUSED_ATTENTION = "_transformer_encoder_layer_fwd", "_native_multi_head_attention"


PATHS = [*itertools.product(("transformer", "transformer_fast"), LAYERED), ("transformer_nested", "encoder")]


@pytest.mark.parametrize("kind", ["", "each", "keys", "square"])
@pytest.mark.parametrize(("variant", "operation"), PATHS)
def test_torch_layers_equal_the_reference_on_the_path_that_they_name(
    spy: Spy, variant: str, operation: str, kind: str
) -> None:
    function = load("torch_transformer").VARIANTS[variant][operation]
    fused = spy(FUSED_ATTENTION if operation.startswith("decoder") else FUSED)
    arrays, params = inputs(operation), weights(operation, groups=4)
    for norm in ("post", "pre"):
        words = {"heads": 4, "norm": norm, **masks(operation, kind)}
        got = function(*as_torch(arrays), as_torch(params), **as_torch(words))
        close(got, getattr(reference, operation)(*arrays, params, **words))
    layers = 1 if operation.endswith("layer") else 2
    assert len(fused) == (0 if variant == "transformer" else 2 * layers)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("front", [False, True])
def test_padding_goes_into_nested_tensors_where_it_stands_behind(spy: Spy, norm: str, front: bool) -> None:
    functions = load("torch_transformer").VARIANTS
    fused, arrays, params = spy(FUSED), inputs("encoder"), weights("encoder", groups=4)
    mask = np.array([[True, True, False], [True, False, False]])[:, ::-1] if front else np.arange(3) < [[2], [1]]
    words = {"heads": 4, "norm": norm, "mask": mask[:, None, None].copy()}
    call = functools.partial(functions["transformer_nested"]["encoder"], *as_torch(arrays), as_torch(params))
    got = call(**as_torch(words)).numpy()
    assert got.shape == arrays[0].shape, "trailing columns of padding stay, unlike in pytorch#97111"
    close(got[mask], reference.encoder(*arrays, params, **words)[mask])
    nested = norm == "post" and not front
    assert [x.is_nested for x in fused] == [nested] * 2
    if nested:  # the final norm of 0: pytorch#86120
        close(got[~mask], np.broadcast_to(params["norm"]["bias"], got[~mask].shape))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_transformer_takes_its_stacks_and_fuses_the_encoder(spy: Spy) -> None:
    functions, rng = load("torch_transformer").VARIANTS, np.random.default_rng(0)
    tokens, fused = [rng.integers(0, 7, shape) for shape in ((2, 4), (2, 3))], spy(FUSED)
    for variant, norm, final in itertools.product(functions, ("post", "pre"), ("post", "pre")):
        params = random_transformer(norm=final)  # with final norms or without
        words = {"heads": 4, "norm": norm, "mask": np.arange(4) < [[3], [4]]}
        got = functions[variant]["transformer"](*as_torch(tokens), as_torch(params), **as_torch(words))
        close(got, reference.transformer(*tokens, params, **words))
        assert bool(fused) == (variant != "transformer")
        assert any(x.is_nested for x in fused) == (variant == "transformer_nested" and norm == "post")
        fused.clear()


def test_one_width_is_all_that_torch_has() -> None:
    function = load("torch_transformer").VARIANTS["transformer"]["encoder_layer"]
    with pytest.raises(ValueError, match=r"attention\.wk: got \[8, 4\], wanted \[8, 8\]"):
        function(*as_torch(inputs("encoder_layer")), as_torch(weights("encoder_layer")), heads=4)
