"""The gradient of gelu_new is NaN in float16 for |x| above 148, where it should be 1 or 0.

Library: transformers 5.24.0
Law: gelu/gradient-is-finite
Where: transformers:parts_gpt_oss
Input: ACT2FN["gelu_new"](x) with x = 150 in float16
Got: value 150, gradient NaN
Wanted: gradient 1 (a gradient is finite where the function is smooth): the backward of torch.pow(x, 3) makes 3 x^2,
    which overflows to infinity, and tanh has the slope 0 there. gelu_pytorch_tanh gives 1.
Status: theirs, new
Tracker: none found
Searched: "NewGELUActivation gelu_new float16 gradient NaN torch.pow overflow" in issues (the same in another library
    only: facebookresearch/fairseq 2235); "gelu_new fp16 NaN gradient GPT-2 training half precision" in issues
"""

import sys

import torch
from transformers.activations import ACT2FN

x = torch.tensor([150.0], dtype=torch.float16, requires_grad=True)
y = ACT2FN["gelu_new"](x)
y.backward()
print("value", y.item(), "got gradient", x.grad.item(), "wanted 1")
sys.exit(int(not abs(x.grad.item() - 1) < 1e-2))
