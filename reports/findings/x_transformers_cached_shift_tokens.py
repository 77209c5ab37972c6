"""shift_tokens with a cache: a step gets zeros in place of the channels of the token before it.

Library: x-transformers 2.31.10
Law: decoder_lm/cache-changes-nothing, decoder_lm/new-cache-is-empty, decoder_lm/sessions-do-not-interact,
decoder_lm/any-walk-equals-full, decoder_lm/left-padding-changes-nothing, decoder_lm/defaults-may-be-said,
decoder_lm/masked-tokens-have-no-influence
Where: x_transformers:decoder_shift_tokens
Input: TransformerWrapper around Decoder(shift_tokens=1); can_cache_kv is True; a token after three
Got: other logits than without the cache
Wanted: the logits of the whole: half of the channels come from the token before, which the step does not have
Status: theirs, new
Tracker: none found
Searched: "x-transformers shift_tokens kv cache generation" in issues; "x-transformers kv cache wrong logits" in
issues
"""

import sys

import torch
from x_transformers import Decoder, TransformerWrapper

torch.manual_seed(0)
layers = Decoder(dim=16, depth=2, heads=4, attn_dim_head=8, shift_tokens=1)
model = TransformerWrapper(num_tokens=5, max_seq_len=8, attn_layers=layers).eval()
tokens = torch.tensor([[2, 0, 1, 3]])
with torch.no_grad():
    wanted = model(tokens)[0, -1]
    _, cache = model(tokens[:, :3], return_intermediates=True)
    got = model(tokens, cache=cache)[0, -1]
print(f"can_cache_kv={model.can_cache_kv}: got {got.tolist()}")
print(f"wanted {wanted.tolist()}")
sys.exit(int(not torch.allclose(got, wanted, atol=1e-4)))
