"""softmax without precise=True sums up bfloat16 in bfloat16, where 256 + 1 is 256.

Library: mlx 0.32.4
Law: softmax/works-in-the-declared-precision
Where: mlx:default
Input: 512 bfloat16 logits that are equal
Got: each 1/256 or more, in sum 2 or more
Wanted: each 1/512, in sum 1
Status: theirs, known (meant as the price of speed; precise=True is exact)
Tracker: https://github.com/ml-explore/mlx/pull/4178
Searched: "mlx softmax bfloat16 accumulate precision CPU precise=False" in issues
"""

import sys

import mlx.core as mx

logits = mx.zeros((1, 512), mx.bfloat16)
quick, precise = (mx.softmax(logits, axis=-1, precise=flag).astype(mx.float32).sum().item() for flag in (False, True))
print("the probabilities sum to", quick, "wanted", precise)
sys.exit(0 if abs(quick - 1) < 0.05 else 1)
