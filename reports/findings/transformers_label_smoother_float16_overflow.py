"""LabelSmoother gives infinity for moderate losses in float16: it sums them up before it divides.

Library: transformers 5.24.0
Law: cross_entropy/finite-for-finite-logits
Where: transformers:sampling
Input: LabelSmoother(0.1) of seven rows of logits [10000, 0] in float16, labels 1
Got: inf
Wanted: 9500 (finite logits have finite losses, if the dtype can hold these): nll_loss.sum() has the dtype of the logits
    and 7 times 10000 is past 65504. The sum over classes beside it is taken in float32 for this very reason.
Status: theirs, new
Tracker: none found
Searched: "LabelSmoother float16 inf loss overflow nll_loss sum" in issues (huggingface/transformers 10674, closed, is
    the overflow of the sum over classes); "Trainer label_smoothing_factor fp16 loss inf LabelSmoother" in issues
"""

import sys

import torch
from transformers.trainer_pt_utils import LabelSmoother

logits, labels = torch.tensor([[10000.0, 0.0]] * 7, dtype=torch.float16), torch.ones(7, dtype=torch.int64)
loss = LabelSmoother(0.1)({"logits": logits}, labels)
print("got", loss.item(), "wanted", 0.9 * 10000 + 0.1 * 5000)
sys.exit(int(not torch.isfinite(loss)))
