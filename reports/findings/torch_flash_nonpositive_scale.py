"""scaled_dot_product_attention on a CPU: is_causal with scale <= 0 gives NaN, or the wrong keys.

Library: torch 2.13.0
Law: attention/zero-scale-averages, attention/negative-scale-negates-the-query
Where: torch:default, torch:flash
Input: two queries and keys of 1, values [1, 3], is_causal=True, scale=-1 and scale=0 (the default kernel, flash)
Got: first row NaN
Wanted: [1, 2], as the math kernel gives and as the same mask gives as attn_mask: the first row sees the first key
alone. The triangle is filled with -inf before the scores are multiplied by the scale.
Status: theirs, new
Tracker: none found
Searched: "scaled_dot_product_attention CPU flash is_causal negative scale NaN" in issues; "pytorch cpu flash attention
scale=0 is_causal nan causal mask -inf before scale" in issues
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

q = k = torch.ones(1, 1, 2, 1)
v = torch.tensor([[[[1.0], [3.0]]]])
wrong = False
for scale in (-1.0, 0.0):
    got = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    print(f"scale={scale}: got {got.flatten().tolist()}, wanted {wanted.flatten().tolist()}, as the math kernel gives")
    wrong |= not torch.allclose(got, wanted)
sys.exit(int(wrong))
