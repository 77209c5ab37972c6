"""Implementations under test, one self-contained file each; none is exempt from the laws."""

NUMPY = (
    "veriformer.impls.numpy_plain",
    "veriformer.impls.numpy_blocked",
    "veriformer.impls.numpy_tiled",
    "veriformer.impls.numpy_fused",
    "veriformer.impls.numpy_attention",
    "veriformer.impls.numpy_rows",
    "veriformer.impls.numpy_positions",
    "veriformer.impls.numpy_generation",
    "veriformer.impls.numpy_loss",
    "veriformer.impls.numpy_optimizer",
    "veriformer.impls.numpy_act",
    "veriformer.impls.numpy_transformer",
    "veriformer.impls.numpy_decoder",
    "veriformer.impls.numpy_lean",
    "veriformer.impls.numpy_encoder_decoder",
    "veriformer.impls.numpy_universal",
)
"""Modules behind the registered name `numpy`."""
TORCH = (
    "veriformer.impls.torch_functional",
    "veriformer.impls.torch_sdpa",
    "veriformer.impls.torch_flex",
    "veriformer.impls.torch_attention",
    "veriformer.impls.torch_grouped",
    "veriformer.impls.torch_nn",
    "veriformer.impls.torch_rows",
    "veriformer.impls.torch_positions",
    "veriformer.impls.torch_generation",
    "veriformer.impls.torch_loss",
    "veriformer.impls.torch_optimizer",
    "veriformer.impls.torch_flat",
    "veriformer.impls.torch_act",
    "veriformer.impls.torch_layers",
    "veriformer.impls.torch_packed",
    "veriformer.impls.torch_packed_models",
    "veriformer.impls.torch_transformer",
    "veriformer.impls.torch_decoder",
    "veriformer.impls.torch_lean",
    "veriformer.impls.torch_encoder_decoder",
    "veriformer.impls.torch_universal",
    "veriformer.impls.torch_universal_compacted",
)
"""Modules behind the registered name `torch`."""
TRITON = (
    "veriformer.impls.triton_kernels",
    "veriformer.impls.triton_attention",
    "veriformer.impls.triton_cached",
)
"""Modules behind the registered name `triton`."""
TORCH_CUDA = ("veriformer.impls.torch_cuda",)
"""Modules behind the registered name `torch_cuda`."""
TRANSFORMERS = (
    "veriformer.impls.transformers_decoders",
    "veriformer.impls.transformers_encoders",
    "veriformer.impls.transformers_seq2seq",
    "veriformer.impls.transformers_logits",
)
"""Modules behind the registered name `transformers`."""
X_TRANSFORMERS = (
    "veriformer.impls.x_transformers_attention",
    "veriformer.impls.x_transformers_models",
)
"""Modules behind the registered name `x_transformers`."""
ONNX = (
    "veriformer.impls.onnx_reference",
    "veriformer.impls.onnx_attention",
)
"""Modules behind the registered name `onnx`."""
ONNXRUNTIME = (
    "veriformer.impls.onnxruntime_kernels",
    "veriformer.impls.onnxruntime_graphs",
)
"""Modules behind the registered name `onnxruntime`."""
JAX = ("veriformer.impls.jax_nn",)
"""Modules behind the registered name `jax`."""
FLAX = (
    "veriformer.impls.flax_linen",
    "veriformer.impls.flax_nnx",
)
"""Modules behind the registered name `flax`."""
EQUINOX = ("veriformer.impls.equinox_nn",)
"""Modules behind the registered name `equinox`."""
OPTAX = (
    "veriformer.impls.optax_losses",
    "veriformer.impls.optax_updates",
)
"""Modules behind the registered name `optax`."""
KERAS_TORCH = ("veriformer.impls.keras_torch",)
"""Modules behind the registered name `keras_torch`."""
KERAS_JAX = ("veriformer.impls.keras_jax",)
"""Modules behind the registered name `keras_jax`."""
MLX = ("veriformer.impls.mlx_fast",)
"""Modules behind the registered name `mlx`."""
OPENVINO = ("veriformer.impls.openvino_opset",)
"""Modules behind the registered name `openvino`."""
LITGPT = ("veriformer.impls.litgpt_models",)
"""Modules behind the registered name `litgpt`."""
