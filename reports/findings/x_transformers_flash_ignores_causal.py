"""With flash=True, Attend and Attention do not look at causal= given to a call.

Library: x-transformers 2.31.10
Law: attention/*, attention/equals-the-reference, attention/future-has-no-influence, attention/masks-combine,
attention/single-visible-key-gives-its-value, attention/gradient-of-hidden-keys-is-zero,
attention/hidden-equals-deleted, attention/hidden-content-has-no-influence, attention/zero-scale-averages,
attention/output-lies-between-the-values, attention/gradient-equals-the-reference,
attention/empty-row-is-as-declared, attention/empty-rows-pass-nothing-on,
attention/value-gradients-sum-to-the-cotangents
Where: x_transformers:attend_flash_told
Input: Attend(flash=True)(q, k, v, causal=True), two zero queries and keys, values [0, 1]
Got: first row 0.5: it sees the later value
Wanted: 0, as with flash=False: forward reads causal, and calls flash_attn, which takes it too, without it
Status: theirs, new
Tracker: none found
Searched: "x-transformers flash attention causal argument ignored Attend" in issues; "lucidrains x-transformers
grouped query attention kv heads repeat order flash" in issues
"""

import sys

import torch
from x_transformers.attend import Attend

q = k = torch.zeros(1, 1, 2, 1)
v = torch.tensor([[[[0.0], [1.0]]]])
slow, fast = (Attend(flash=flash)(q, k, v, causal=True)[0].flatten().tolist() for flash in (False, True))
print(f"got {fast} with flash, wanted {slow}, as without")
sys.exit(int(fast != slow))
