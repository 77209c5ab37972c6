"""Sliding window with a cache: a chunk that runs over the end of the ring sees its own future and misses the past.

Library: litgpt 0.5.13
Law: decoder_lm/cache-changes-nothing, decoder_lm/new-cache-is-empty, decoder_lm/any-walk-equals-full
Where: litgpt:gpt_window, litgpt:gpt_window_alternating
Input: GPT with sliding_window_size=4; token 0, then tokens 1 to 4 in one chunk (4 is what the error for longer chunks
advises)
Got: other logits than without the cache
Wanted: the logits of the whole: token 4 takes the place of token 0, which tokens 1 to 3 should still see, and the
mask,
a triangle cut off at 4 columns, lets them see it at the place of token 0
Status: theirs, new (https://github.com/Lightning-AI/litgpt/issues/2182 is about chunks longer than the window)
Tracker: none found
Searched: "litgpt sliding window KV cache ring buffer mask chunked prefill causality" in issues
"""

import sys

import torch
from litgpt.config import Config
from litgpt.model import GPT

torch.manual_seed(0)
sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 5, "padded_vocab_size": 5}
model = GPT(Config(**sizes, sliding_window_size=4, sliding_window_indices=[1])).eval()
tokens = torch.tensor([[2, 0, 1, 3, 4]])
with torch.no_grad():
    wanted = model(tokens)[0, 1]
    model.set_kv_cache(1)
    model(tokens[:, :1], torch.tensor([0]))
    got = model(tokens[:, 1:], torch.tensor([1, 2, 3, 4]))[0, 0]
print(f"token 1: got {got.tolist()}")
print(f"wanted {wanted.tolist()}")
sys.exit(int(not torch.allclose(got, wanted, atol=1e-5)))
