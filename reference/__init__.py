"""The mathematics of the operations, written once, to be read and to be the oracle.

Array-API style: the same lines run on NumPy, torch and array-api-strict. Pure functions.
Reading order: softmax, normalization, positions, attention, activations, feed_forward, embedding,
dropout, layers, varlen, kv_cache; `loops` and `loops_layers` say the same again in scalar loops.

Take functions from here or from their file (`from veriformer.reference.attention import attention`).
"""

from veriformer.reference.activations import gelu, relu
from veriformer.reference.attention import attention, attention_with_lse, visible_keys
from veriformer.reference.dropout import dropout
from veriformer.reference.embedding import embedding
from veriformer.reference.feed_forward import feed_forward
from veriformer.reference.kv_cache import cached_attention
from veriformer.reference.layers import attend, encoder_layer, keys_values, multi_head_attention
from veriformer.reference.normalization import layer_norm, rms_norm
from veriformer.reference.positions import alibi_bias, rotary_embedding, sinusoidal_positions
from veriformer.reference.softmax import log_softmax, logsumexp, softmax
from veriformer.reference.varlen import varlen_attention

__all__ = [
    "alibi_bias",
    "attend",
    "attention",
    "attention_with_lse",
    "cached_attention",
    "dropout",
    "embedding",
    "encoder_layer",
    "feed_forward",
    "gelu",
    "keys_values",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "multi_head_attention",
    "relu",
    "rms_norm",
    "rotary_embedding",
    "sinusoidal_positions",
    "softmax",
    "varlen_attention",
    "visible_keys",
]
