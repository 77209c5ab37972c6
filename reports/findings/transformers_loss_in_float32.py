"""The loss of a model in float64 is computed and returned in float32.

Library: transformers 5.24.0
Law: cross_entropy/keeps-the-dtype
Where: transformers:sampling, transformers:causal_loss
Input: ForCausalLMLoss of logits [[1, 0]] in float64, label 0
Got: 0.31326166, torch.float32 (log1p(exp(-1)) is 0.31326168751822)
Wanted: float64: what goes in as float64 comes out so. The cast that is meant to widen 16-bit logits narrows these, and
    gradcheck fails. For 16-bit logits a loss in float32 is a choice, and the label smoother makes it as well.
Status: theirs, new
Tracker: none found
Searched: "ForCausalLMLoss logits.float() float64 downcast loss dtype" in issues; "double precision loss float32
    logits.float gradcheck" in issues
"""

import sys

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

logits, label = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([0])
loss = ForCausalLMLoss(logits, None, 2, shift_labels=label)
wanted = torch.nn.functional.cross_entropy(logits, label)
print("got", loss.item(), loss.dtype, "wanted", wanted.item(), wanted.dtype)
sys.exit(int(loss.dtype is not torch.float64))
