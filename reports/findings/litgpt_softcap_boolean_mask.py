"""Attention with softcapping adds the boolean mask of the cache to the scores, so that nothing is hidden.

Library: litgpt 0.5.13
Law: decoder_lm/cache-changes-nothing, decoder_lm/new-cache-is-empty, decoder_lm/any-walk-equals-full
Where: litgpt:gpt_softcap
Input: GPT with attention_logit_softcapping=2.0; one token with set_kv_cache
Got: other logits than without the cache: free rows of the cache are seen
Wanted: the logits without the cache
Status: theirs, known
Tracker: https://github.com/Lightning-AI/litgpt/issues/1672
Searched: "litgpt attention_logit_softcapping kv cache mask boolean added to scores gemma 2" in issues
"""

import sys

import torch
from litgpt.config import Config
from litgpt.model import GPT

torch.manual_seed(0)
sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 5, "padded_vocab_size": 5}
model = GPT(Config(**sizes, attention_logit_softcapping=2.0)).eval()
tokens = torch.tensor([[2]])
with torch.no_grad():
    wanted = model(tokens)[0, 0]
    model.set_kv_cache(1)
    got = model(tokens, torch.tensor([0]))[0, 0]
print(f"got {got.tolist()}")
print(f"wanted {wanted.tolist()}")
sys.exit(int(not torch.allclose(got, wanted, atol=1e-5)))
