"""clip_grad_norm_ makes all gradients 0 where the squares overflow, though the norm does not.

Library: torch 2.13.0
Law: clip_by_global_norm/equals-the-reference, clip_by_global_norm/long-gradients-get-the-norm,
clip_by_global_norm/short-gradients-are-left-alone
Where: torch:optimizer, torch:optimizer_foreach
Input: gradient [3e25, 4e25] in float32, max_norm=1e25
Got: [0, 0]
Wanted: [6e24, 8e24]: the norm is 5e25, which float32 holds
Status: theirs, known
Tracker: https://github.com/pytorch/pytorch/issues/193006
Searched: "clip_grad_norm_ overflow total_norm inf large gradients zero float32 squares" in issues;
https://github.com/pytorch/pytorch/issues/46849 is about norms that are infinite themselves
"""

import sys

import torch

param = torch.zeros(2)
param.grad = torch.tensor([3e25, 4e25])
torch.nn.utils.clip_grad_norm_([param], 1e25)
print(f"got {param.grad.tolist()}, wanted [6e+24, 8e+24]")
sys.exit(int(not torch.allclose(param.grad, torch.tensor([6e24, 8e24]))))
