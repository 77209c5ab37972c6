"""layer_norm of width 1: the weight gets a gradient that is not 0.

Library: torch 2.13.0
Law: layer_norm/width-one-has-no-weight-gradient
Where: torch:functional, keras_torch:layers
Input: layer_norm([13], weight [1], bias [0]) in float32 and float64
Got: a gradient of some 1e-6 (float32)
Wanted: 0: a single channel is its own mean, so that weight multiplies 0. The kernel takes the difference of two
roundings of x g / deviation.
Status: theirs, known
Tracker: https://github.com/pytorch/pytorch/issues/188375
Searched: "layer_norm backward weight gradient nonzero normalized_shape 1 single element" in issues
"""

import sys

import torch

wrong = False
for dtype in (torch.float32, torch.float64):
    weight = torch.ones(1, dtype=dtype, requires_grad=True)
    out = torch.nn.functional.layer_norm(torch.tensor([13.0], dtype=dtype), (1,), weight, torch.zeros(1, dtype=dtype))
    for cotangent in (1.0, 0.7, -3.3):
        weight.grad = None
        out.backward(torch.tensor([cotangent], dtype=dtype), retain_graph=True)
        print(f"{dtype}: cotangent {cotangent}: got {weight.grad.item()}, wanted 0.0")
        wrong |= weight.grad.item() != 0
sys.exit(int(wrong))
