"""The Triton kernels compiled for a GPU where there is none, and calls at the edge of what a GPU takes.

The interpreter runs much that the compiler refuses. Each test runs a process of its own, as the interpreter is chosen
for a whole process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from toys import run_python

pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed (pip install veriformer[triton])")

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from veriformer.impls import triton_attention, triton_cached, triton_kernels

NUMBERS = {"scale", "plain_scale", "temperature", "count", "eps"}
SINGLE = {"mean_ptr", "scale_ptr", "dw_ptr", "db_ptr", "lse_ptr", "delta_ptr", "parts_ptr"}
TILES = {"ROWS": 4, "BLOCK": 64, "CAUSAL": True, "MASKED": True, "D": 16, "DV": 16, "M": 16, "N": 16, "PARTS": 2}
# sizes and strides of 1 are constants to the compiler, lengths of attention never
ONES = {"height", "width", "tiles", "heads", "shared", "groups", "new", "capacity", "value_width", "parts", "new_d"}

def types(kernel, dtype):
    for name in kernel.arg_names:
        if name in NUMBERS:
            yield name, "fp32"
        elif not name.endswith("_ptr"):
            yield name, "i32"
        elif name == "lengths_ptr":
            yield name, "*i64"
        elif name == "mask_ptr":
            yield name, "*u8"
        else:
            single = name in SINGLE or name == "out_ptr" and kernel is triton_cached.part_kernel
            yield name, "*fp32" if single else "*" + dtype

def compiled(kernel, dtype, constants):
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = dict(types(kernel, dtype)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): v for name, v in constants.items()})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "num_stages": 1})
    print(kernel.__name__)

module = {m.__name__.rpartition("_")[2]: m for m in (triton_attention, triton_cached, triton_kernels)}[sys.argv[1]]
for name, kernel in sorted(vars(module).items()):
    if name.endswith("_kernel") and kernel is not None:
        compiled(kernel, "fp16", TILES)
        compiled(kernel, "bf16", TILES | dict.fromkeys(ONES, 1) | {"BLOCK": 1, "CAUSAL": False, "MASKED": False})
"""
KERNELS = {
    "kernels": ("layer_norm_backward_kernel", "layer_norm_kernel", "softmax_backward_kernel", "softmax_kernel"),
    "attention": ("attention_kernel", "key_gradient_kernel", "query_gradient_kernel"),
    "cached": ("append_kernel", "join_kernel", "part_kernel"),
}


@pytest.mark.parametrize("module", KERNELS)
def test_every_kernel_compiles(module: str, tmp_path: Path) -> None:
    from triton import knobs

    if not Path(knobs.nvidia.ptxas.path).exists():
        pytest.skip("triton has no ptxas here")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = run_python("-c", COMPILE, module, folder=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [name for name in KERNELS[module] for _ in range(2)]


EDGES = """
import torch
from veriformer.impls import triton_attention, triton_cached

# the second sequence has no room for two of its three new rows; what lies behind its cache is NaN
torch.manual_seed(0)
lengths, D = torch.tensor([4, 46]), 20
behind = [torch.full((3 * 48 * D,), float("nan")) for _ in "kv"]
caches = [x[: 2 * 48 * D].view(2, 1, 48, D) for x in behind]
for cache in caches:
    cache.copy_(torch.randn(cache.shape))
q, k, v = torch.randn(2, 2, 3, D), torch.randn(2, 1, 3, D), torch.randn(2, 1, 3, D)
out = triton_cached.cached_attention(q, k, v, *caches, lengths)[0]
assert out.isfinite().all() and torch.equal(caches[1][1, :, 46:], v[1, :, :2])
assert all(x[2 * 48 * D :].isnan().all() for x in behind)

none = torch.ones(0, 2, 1, D)
assert triton_cached.cached_attention(none, *[none[:, :1]] * 4, torch.ones(0, dtype=torch.int64))[0].shape == none.shape
many = torch.ones(1, 1, 1, 16).expand(65536, 1, 1, 16)
for call in (lambda: triton_attention.attention(many, many, many),
             lambda: triton_cached.cached_attention(*[many] * 5, torch.zeros(65536, dtype=torch.int64))):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_edges_of_caches_and_of_the_grid(tmp_path: Path) -> None:
    done = run_python("-c", EDGES, folder=tmp_path, env={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "q: got [65536, 1, 1, 16], wanted at most 65535 heads in all",
        "caches: got [65536, 1, 1, 16], wanted at most 65535 key heads in all",
    ]
