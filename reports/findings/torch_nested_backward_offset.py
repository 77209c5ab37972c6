"""Backward of attention on jagged nested tensors reads a cotangent from the start of its storage.

Library: torch 2.13.0
Law: varlen_attention/gradient-does-not-depend-on-the-layout
Where: torch:nested
Input: scaled_dot_product_attention on jagged tensors of a sequence of one row and an empty one; the cotangent of the
values is a slice that begins at the second number of its storage [5, 1]
Got: the gradient of the value is 5 (without the empty sequence RuntimeError: sizes do not sum to 2)
Wanted: 1, the cotangent, as for a copy of the slice
Status: theirs, new
Tracker: none found
Searched: "jagged nested tensor backward wrong gradient non-contiguous grad_output storage offset" in issues;
"torch.nested jagged scaled_dot_product_attention gradient wrong storage_offset contiguous" in issues
"""

import sys

import torch
from torch.nested import nested_tensor_from_jagged

offsets, found = torch.tensor([0, 1, 1]), []
for cotangent in (torch.tensor([5.0, 1.0])[1:].view(1, 1, 1), torch.ones(1, 1, 1)):
    value = torch.ones(1, 1, 1, requires_grad=True)
    q, k = (nested_tensor_from_jagged(torch.zeros(1, 1, 1), offsets).transpose(1, 2) for _ in range(2))
    v = nested_tensor_from_jagged(value, offsets).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    out.values().backward(cotangent)
    found.append(value.grad.item())
print(f"got {found[0]}, wanted {found[1]}, as for a copy of the cotangent")
sys.exit(int(found[0] != found[1]))
