"""MultiheadAttention asked for weights: a row that sees nothing makes every gradient NaN.

Library: torch 2.13.0
Law: multi_head_attention/gradient-ignores-unused-empty-rows
Where: torch:weights
Input: MultiheadAttention(2, 2, batch_first=True), two samples, the second one padded throughout; loss from the first
Got: the gradient of in_proj_weight is NaN with need_weights=True
Wanted: a finite gradient, as with need_weights=False: nobody uses the padded sample's output
Status: theirs, known
Tracker: https://github.com/pytorch/pytorch/issues/41508
Searched: "MultiheadAttention gradient NaN fully masked row need_weights key_padding_mask all True backward" in issues
"""

import sys

import torch

torch.manual_seed(0)
module = torch.nn.MultiheadAttention(2, 2, batch_first=True)
x, hidden = torch.ones(2, 1, 2), torch.tensor([[False], [True]])
found = {}
for weights in (True, False):
    module.zero_grad()
    module(x, x, x, key_padding_mask=hidden, need_weights=weights)[0][0].sum().backward()
    found[weights] = module.in_proj_weight.grad.isfinite().all().item()
print(f"gradient finite: got {found[True]} with need_weights=True, wanted {found[False]}, as without")
sys.exit(int(found[True] != found[False]))
