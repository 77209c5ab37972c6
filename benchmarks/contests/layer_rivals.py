"""What a user would pick instead of our layers: torch.nn's modules, torch.compile, ONNX Runtime, JAX.

Weights are a module's of torch.nn; `weights` has them by our names, [in, out]. Every maker gives a call of one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from contest import Call, Maker
from torch import Tensor, nn

Params = dict[str, Any]


def attention_weights(module: nn.MultiheadAttention) -> Params:
    """Those of torch.nn.MultiheadAttention by our names."""
    found = dict(zip(("wq", "wk", "wv"), (part.T.contiguous() for part in module.in_proj_weight.chunk(3)), strict=True))
    found |= dict(zip(("bq", "bk", "bv"), (part.clone() for part in module.in_proj_bias.chunk(3)), strict=True))
    return found | {"wo": module.out_proj.weight.T.contiguous(), "bo": module.out_proj.bias}


def weights(layer: nn.Module) -> Params:
    """Those of a layer of torch.nn by our names."""
    found: Params = {"attention": attention_weights(layer.self_attn)}
    if hasattr(layer, "multihead_attn"):
        found["cross_attention"] = attention_weights(layer.multihead_attn)
    for name in ("norm1", "norm2", "norm3"):
        if hasattr(layer, name):
            found[name] = {"weight": getattr(layer, name).weight, "bias": getattr(layer, name).bias}
    found["feed_forward"] = {f"w{i}": getattr(layer, f"linear{i}").weight.T.contiguous() for i in (1, 2)}
    found["feed_forward"] |= {f"b{i}": getattr(layer, f"linear{i}").bias for i in (1, 2)}
    return found


def detached(tree: Any, wanted: bool = False) -> Any:
    """Copies of all weights in a tree, which want gradients or not."""
    if isinstance(tree, dict):
        return {name: detached(part, wanted) for name, part in tree.items()}
    if isinstance(tree, list):
        return [detached(part, wanted) for part in tree]
    return tree.detach().clone().requires_grad_(wanted)


def leaves(tree: Any) -> list[Tensor]:
    """All weights in a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


def inferring(function: Callable[[], Any]) -> Call:
    """The call in inference mode."""

    def call() -> Any:
        with torch.inference_mode():
            return function()

    return call


def attention(x: Tensor, memory: Tensor, module: nn.MultiheadAttention, *, naive: bool = False, **words: Any) -> Tensor:
    """Attention as it is written around scaled_dot_product_attention, or without it; to itself by one projection."""
    width, w, b = x.shape[2], module.in_proj_weight, module.in_proj_bias
    if memory is x:
        projected = F.linear(x, w, b).chunk(3, 2)
    else:
        projected = (F.linear(x, w[:width], b[:width]), *F.linear(memory, w[width:], b[width:]).chunk(2, 2))
    split = [rows.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for rows in projected]
    out = _naive_attention(*split) if naive else F.scaled_dot_product_attention(*split, **words)
    return F.linear(out.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)


def _naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def handwritten(layer: nn.Module, *, naive: bool = False, mask: Tensor | None = None) -> Callable[..., Tensor]:
    """A layer's sublayers one after the other, as it is written by hand; post-norm."""

    def run(x: Tensor, memory: Tensor | None = None) -> Tensor:
        causal = {"is_causal": True} if memory is not None else {} if mask is None else {"attn_mask": mask}
        x = layer.norm1(x + attention(x, x, layer.self_attn, naive=naive, **causal))
        if memory is not None:
            x = layer.norm2(x + attention(x, memory, layer.multihead_attn))
        last = layer.norm2 if memory is None else layer.norm3
        return last(x + layer.linear2(F.relu(layer.linear1(x))))

    return run


def compiled(function: Callable[..., Any], *arguments: Any) -> Maker:
    """Compiled for these shapes before it is timed, without gradients."""

    def make() -> Call:
        fast = torch.compile(function, dynamic=False, fullgraph=True)

        def call() -> Any:
            with torch.no_grad():
                return fast(*arguments)

        call()
        return call

    return make


def onnx_attention(x: Tensor, module: nn.MultiheadAttention) -> Maker:
    """ONNX Runtime with its own fused attention."""
    return lambda: _session(x, _attention_nodes(module), "projected", _attention_arrays(module))


def onnx_layer(x: Tensor, layer: nn.Module) -> Maker:
    """ONNX Runtime with its own fused attention and its fused residual norms, as its optimizer leaves them."""

    def make() -> Call:
        from onnx import helper

        def normed(rows: str, beside: str, norm: str, bias: str, out: str) -> Any:
            names = [rows, beside, f"{norm}.weight", f"{norm}.bias", bias]
            return helper.make_node("SkipLayerNormalization", names, [out], domain="com.microsoft", epsilon=1e-5)

        nodes = [
            *_attention_nodes(layer.self_attn, bias=False),
            normed("projected", "x", "norm1", "bo", "middle"),
            helper.make_node("MatMul", ["middle", "w1"], ["inner"]),
            helper.make_node("Add", ["inner", "b1"], ["shifted"]),
            helper.make_node("Relu", ["shifted"], ["active"]),
            helper.make_node("MatMul", ["active", "w2"], ["fed"]),
            normed("fed", "middle", "norm2", "b2", "out"),
        ]
        mine = weights(layer)
        arrays = _attention_arrays(layer.self_attn) | mine["feed_forward"]
        arrays |= {f"{norm}.{name}": mine[norm][name] for norm in ("norm1", "norm2") for name in ("weight", "bias")}
        return _session(x, nodes, "out", arrays)

    return make


def _attention_nodes(module: nn.MultiheadAttention, bias: bool = True) -> list[Any]:
    from onnx import helper

    nodes = [
        helper.make_node(
            "Attention", ["x", "wqkv", "bqkv"], ["mixed"], domain="com.microsoft", num_heads=module.num_heads
        ),
        helper.make_node("MatMul", ["mixed", "wo"], ["joined" if bias else "projected"]),
    ]
    return [*nodes, helper.make_node("Add", ["joined", "bo"], ["projected"])] if bias else nodes


def _attention_arrays(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    found = attention_weights(module)
    joint = {"wqkv": module.in_proj_weight.T, "bqkv": module.in_proj_bias}
    return joint | {name: found[name] for name in ("wo", "bo")}


def _session(x: Tensor, nodes: list[Any], out: str, arrays: dict[str, Tensor]) -> Call:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    shape = list(x.shape)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", out)]
    constants = [numpy_helper.from_array(a.detach().contiguous().numpy(), name) for name, a in arrays.items()]
    graph = helper.make_graph(nodes, "layer", values[:1], values[1:], constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    array = x.numpy()
    return lambda: session.run(None, {"x": array})[0]


def jax_attention(x: Tensor, module: nn.MultiheadAttention) -> Maker:
    """jax.jit of attention around jax.nn.dot_product_attention."""

    def make() -> Call:
        import jax

        w, array = _arrays(attention_weights(module)), jax.numpy.asarray(x.numpy())
        run = jax.jit(lambda x, w: _jax_mixed(x, w, module.num_heads))
        return lambda: run(array, w).block_until_ready()

    return make


def jax_layer(x: Tensor, layer: nn.Module) -> Maker:
    """jax.jit of an encoder layer around jax.nn.dot_product_attention."""

    def make() -> Call:
        import jax

        def run(x: Any, w: Any) -> Any:
            x = _jax_normed(x + _jax_mixed(x, w["attention"], layer.self_attn.num_heads), w["norm1"])
            inner = w["feed_forward"]
            fed = jax.nn.relu(x @ inner["w1"] + inner["b1"]) @ inner["w2"] + inner["b2"]
            return _jax_normed(x + fed, w["norm2"])

        fast, w, array = jax.jit(run), _arrays(weights(layer)), jax.numpy.asarray(x.numpy())
        return lambda: fast(array, w).block_until_ready()

    return make


def _arrays(tree: Any) -> Any:
    import jax

    return jax.tree.map(lambda one: jax.numpy.asarray(np.asarray(one.detach())), tree)


def _jax_mixed(x: Any, w: Any, heads: int) -> Any:
    import jax

    q, k, v = ((x @ w["w" + n] + w["b" + n]).reshape(*x.shape[:2], heads, -1) for n in "qkv")
    return jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w["wo"] + w["bo"]


def _jax_normed(x: Any, w: Any) -> Any:
    import jax

    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]
