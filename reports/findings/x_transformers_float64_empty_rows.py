"""In float64 a row that sees nothing is NaN, and so are gradients and left-padded batches.

Library: x-transformers 2.31.10
Law: attention/value-gradients-sum-to-the-cotangents, attention/empty-rows-pass-nothing-on,
attention/gradient-is-finite, attention/gradient-equals-the-reference,
multi_head_attention/gradient-ignores-unused-empty-rows, decoder_lm/left-padding-changes-nothing
Where: x_transformers:attend*, x_transformers:decoder*
Input: Attend()(q, k, v, mask=False) in float64, one query, one key; and the gradient of v
Got: gradient NaN (in float32 0); a TransformerWrapper in float64 with seq_start_pos=[2] gives NaN logits everywhere
Wanted: 0, as in float32: hidden scores are -finfo(float64).max, which the softmax with dtype=torch.float32 makes
-inf.
The output is filled with 0 for rows that a mask empties, but NaN stays in the backward, and in rows that mask and
triangle empty together.
Status: theirs, new
Tracker: none found
Searched: "x-transformers fully masked row NaN double float64 softmax float32 max_neg_value" in issues;
"x-transformers kv cache wrong logits" in issues
"""

import sys

import torch
from x_transformers import Decoder, TransformerWrapper
from x_transformers.attend import Attend

zero = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
value = zero.clone().requires_grad_()
Attend()(zero, zero, value, mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool))[0].sum().backward()
print(f"gradient: got {value.grad.item()}, wanted 0.0")
layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8)
model = TransformerWrapper(num_tokens=5, max_seq_len=8, attn_layers=layers).double().eval()
with torch.no_grad():
    padded = model(torch.tensor([[0, 0, 1, 2]]), seq_start_pos=torch.tensor([2]))[:, 2:]
print(f"left-padded logits: got {padded[0, -1, :2].tolist()}, wanted numbers")
sys.exit(int(not (value.grad.isfinite().all() and padded.isfinite().all())))
