"""The mathematics of the operations, written once, to be read and to be the oracle.

Array-API style: the same lines run on NumPy, torch and array-api-strict. Pure functions.
Reading order: softmax, normalization, positions, attention, activations, feed_forward, embedding,
dropout, layers, transformer, initialization, decoding, generation, act, pondering, universal,
universal_decoding, universal_dialects, loss, optim; for kernels, varlen and kv_cache.
`loops`, `loops_layers`, `loops_loss`, `loops_models` and `loops_universal` say the same again in scalar loops.

Take functions from here or from their file (`from veriformer.reference.attention import attention`).
"""

from veriformer.reference.act import act_loop, adaptive_computation_time, halting_weights, ponder_cost, recurrent_act
from veriformer.reference.activations import gelu, relu
from veriformer.reference.attention import attention, attention_with_lse, visible_keys
from veriformer.reference.decoding import (
    crop,
    decoder_lm_step,
    evict,
    reorder,
    transformer_encode,
    transformer_step,
)
from veriformer.reference.dropout import dropout
from veriformer.reference.embedding import embedding
from veriformer.reference.feed_forward import feed_forward
from veriformer.reference.generation import beam_search, generate, greedy, next_token_probabilities, sample
from veriformer.reference.initialization import initial_decoder_lm, initial_layer, initial_transformer
from veriformer.reference.kv_cache import cached_attention
from veriformer.reference.layers import (
    attend,
    decoder_layer,
    deep_norm,
    encoder_layer,
    keys_values,
    multi_head_attention,
)
from veriformer.reference.loss import cross_entropy
from veriformer.reference.normalization import layer_norm, rms_norm
from veriformer.reference.optim import adamw_step, clip_by_global_norm, noam_schedule
from veriformer.reference.pondering import divergence, geometric_prior, stick_breaking
from veriformer.reference.positions import alibi_bias, rotary_embedding, sinusoidal_positions
from veriformer.reference.softmax import log_softmax, logsumexp, softmax
from veriformer.reference.transformer import decoder, decoder_lm, encoder, transformer
from veriformer.reference.universal import universal_transformer
from veriformer.reference.universal_decoding import universal_step
from veriformer.reference.universal_dialects import universal_dialect
from veriformer.reference.varlen import varlen_attention

__all__ = [
    "act_loop",
    "adamw_step",
    "adaptive_computation_time",
    "alibi_bias",
    "attend",
    "attention",
    "attention_with_lse",
    "beam_search",
    "cached_attention",
    "clip_by_global_norm",
    "crop",
    "cross_entropy",
    "decoder",
    "decoder_layer",
    "decoder_lm",
    "decoder_lm_step",
    "deep_norm",
    "divergence",
    "dropout",
    "embedding",
    "encoder",
    "encoder_layer",
    "evict",
    "feed_forward",
    "gelu",
    "generate",
    "geometric_prior",
    "greedy",
    "halting_weights",
    "initial_decoder_lm",
    "initial_layer",
    "initial_transformer",
    "keys_values",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "multi_head_attention",
    "next_token_probabilities",
    "noam_schedule",
    "ponder_cost",
    "recurrent_act",
    "relu",
    "reorder",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "sinusoidal_positions",
    "softmax",
    "stick_breaking",
    "transformer",
    "transformer_encode",
    "transformer_step",
    "universal_dialect",
    "universal_step",
    "universal_transformer",
    "varlen_attention",
    "visible_keys",
]
