"""layer_norm of width 1 in bfloat16 and float16 does not give the bias.

Library: torch 2.13.0
Law: layer_norm/width-one-gives-the-bias
Where: torch:functional
Input: layer_norm([10], weight [1], bias [0], eps=1e-3) in bfloat16 and float16
Got: a number of some 1e-6
Wanted: 0: a single channel is its own mean. The low-precision kernel folds the mean into a shift, x r - m r, with one
fused rounding.
Status: theirs, known
Tracker: https://github.com/pytorch/pytorch/issues/188375
Searched: "layer_norm bfloat16 float16 CPU constant input not zero accuracy fused mean shift" and "layer_norm backward
weight gradient nonzero normalized_shape 1 single element" in issues; the thread has both, of bfloat16
"""

import sys

import torch

wrong = False
for dtype in (torch.bfloat16, torch.float16):
    one, zero = torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    got = torch.nn.functional.layer_norm(torch.tensor([10.0], dtype=dtype), (1,), one, zero, 1e-3).item()
    print(f"{dtype}: got {got}, wanted 0.0")
    wrong |= got != 0
sys.exit(int(wrong))
