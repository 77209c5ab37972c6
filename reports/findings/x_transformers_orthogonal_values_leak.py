"""attn_orthog_projected_values lets a decoder see later tokens.

Library: x-transformers 2.31.10
Law: decoder_lm/cache-changes-nothing, decoder_lm/new-cache-is-empty, decoder_lm/sessions-do-not-interact,
decoder_lm/any-walk-equals-full, decoder_lm/left-padding-changes-nothing, decoder_lm/defaults-may-be-said,
decoder_lm/prefix-decides, decoder_lm/future-has-no-influence, decoder_lm/masked-tokens-have-no-influence
Where: x_transformers:decoder_orthogonal_values
Input: TransformerWrapper around Decoder(attn_orthog_projected_values=True); tokens [2, 0, 1, 3] and [2, 0, 1, 4]
Got: the logits of the first token differ
Wanted: equal logits before the changed token: orthog_project packs 'b *', so that the unit vector and the dot product
are those of the whole sequence and not of each token
Status: theirs, new
Tracker: none found
Searched: "x-transformers orthogonal projected values causal leak orthog_project" in issues; "x-transformers belief
attention orthogonal projected values future leak sequence" in issues
"""

import sys

import torch
from x_transformers import Decoder, TransformerWrapper

torch.manual_seed(0)
layers = Decoder(dim=16, depth=2, heads=4, attn_dim_head=8, attn_orthog_projected_values=True)
model = TransformerWrapper(num_tokens=5, max_seq_len=8, attn_layers=layers).eval()
with torch.no_grad():
    one, other = (model(torch.tensor([[2, 0, 1, last]]))[0, 0] for last in (3, 4))
print(f"logits of the first token: got {one.tolist()}")
print(f"and with another last token {other.tolist()}, wanted the same")
sys.exit(int(not torch.allclose(one, other, atol=1e-5)))
