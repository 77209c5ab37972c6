"""cross_entropy with label smoothing in float16 is infinite for moderate logits.

Library: torch 2.13.0
Law: cross_entropy/finite-for-finite-logits
Where: torch:loss
Input: logits [40000, 0, 0], target 0, label_smoothing=0.1, in float16
Got: inf
Wanted: about 2667, which float16 holds: the logarithms of all classes are added up in float16, before they are
multiplied by 0.1 / 3
Status: theirs, known
Tracker: https://github.com/huggingface/transformers/issues/10674
Searched: "label smoothing cross_entropy fp16 overflow inf loss sum of log probabilities" in issues; the thread found
is of the same sum in another library
"""

import sys

import torch

logits, target = torch.tensor([[40000.0, 0.0, 0.0]]), torch.tensor([0])
wanted = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1).item()
got = torch.nn.functional.cross_entropy(logits.half(), target, label_smoothing=0.1).item()
print(f"got {got} in float16, wanted {wanted}")
sys.exit(int(not abs(got - wanted) < 10))
