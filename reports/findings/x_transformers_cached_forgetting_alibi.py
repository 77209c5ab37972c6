"""attn_data_dependent_alibi with a cache: steps forget nothing, and chunks do not fit.

Library: x-transformers 2.31.10
Law: decoder_lm/cache-changes-nothing, decoder_lm/new-cache-is-empty, decoder_lm/sessions-do-not-interact,
decoder_lm/any-walk-equals-full, decoder_lm/defaults-may-be-said, decoder_lm/left-padding-changes-nothing,
decoder_lm/steps-are-taken, decoder_lm/masked-tokens-have-no-influence
Where: x_transformers:decoder_data_dependent_alibi
Input: TransformerWrapper around Decoder(attn_data_dependent_alibi=True); can_cache_kv is True; a token after three
Got: other logits than without the cache; with cache_age=2 RuntimeError: sizes do not match
Wanted: the logits of the whole: the biases of the new tokens are made of these alone, [1, 1] in place of [1, 4], so
that one number is added to every key
Status: theirs, new
Tracker: none found
Searched: "x-transformers data dependent alibi cache kv inference forgetting transformer" in issues; "x-transformers
kv cache wrong logits" in issues
"""

import sys

import torch
from x_transformers import Decoder, TransformerWrapper

torch.manual_seed(0)
layers = Decoder(dim=16, depth=2, heads=4, attn_dim_head=8, attn_data_dependent_alibi=True)
model = TransformerWrapper(num_tokens=5, max_seq_len=8, attn_layers=layers).eval()
for parameter in model.parameters():
    parameter.data += 0.3 * torch.randn_like(parameter)
tokens = torch.tensor([[2, 0, 1, 3]])
with torch.no_grad():
    wanted = model(tokens)[0, -1]
    _, cache = model(tokens[:, :3], return_intermediates=True)
    got = model(tokens, cache=cache)[0, -1]
print(f"can_cache_kv={model.can_cache_kv}: got {got.tolist()}")
print(f"wanted {wanted.tolist()}")
sys.exit(int(not torch.allclose(got, wanted, atol=1e-4)))
