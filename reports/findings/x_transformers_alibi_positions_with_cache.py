"""ALiBi with pos= and a cache: the bias is square, the scores are not.

Library: x-transformers 2.31.10
Law: decoder_lm/left-padding-changes-nothing, decoder_lm/masked-tokens-have-no-influence,
decoder_lm/defaults-may-be-said
Where: x_transformers:decoder_alibi, x_transformers:decoder_alibi_flash
Input: TransformerWrapper around Decoder(alibi_pos_bias=True); two tokens after two, pos=[[0, 1, 2, 3]]
Got: RuntimeError: sizes do not match
Wanted: the logits of the whole: forward_custom_pos(pos) is asked for all rows, though a step
has fewer queries. (One query without flash comes out with four rows, the last of them right.)
Status: theirs, new
Tracker: none found (https://github.com/lucidrains/x-transformers/issues/298 is about flash without a cache, closed)
Searched: "x-transformers alibi custom positions pos with kv cache shape mismatch forward_custom_pos" in issues;
"x-transformers kv cache wrong logits" in issues
"""

import sys

import torch
from x_transformers import Decoder, TransformerWrapper

torch.manual_seed(0)
layers = Decoder(dim=16, depth=1, heads=4, attn_dim_head=8, alibi_pos_bias=True)
model = TransformerWrapper(num_tokens=5, max_seq_len=8, attn_layers=layers).eval()
tokens, pos = torch.tensor([[2, 0, 1, 3]]), torch.arange(4)[None]
with torch.no_grad():
    wanted = model(tokens, pos=pos)[0, -1]
    _, cache = model(tokens[:, :2], pos=pos[:, :2], return_intermediates=True)
    try:
        got = model(tokens, pos=pos, cache=cache, cache_age=2)[0, -1]
    except RuntimeError as error:
        print(f"got RuntimeError: {error}; wanted {wanted.tolist()}")
        sys.exit(1)
print(f"got {got.tolist()}, wanted {wanted.tolist()}")
sys.exit(int(not torch.allclose(got, wanted, atol=1e-4)))
