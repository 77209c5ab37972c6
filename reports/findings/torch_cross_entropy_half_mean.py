"""The mean of cross_entropy in float16 adds losses, and counts rows, in float16.

Library: torch 2.13.0
Law: cross_entropy/finite-for-finite-logits, cross_entropy/the-mean-counts-every-row
Where: torch:loss, litgpt:parts, litgpt:loss_*
Input: three rows of logits [30000, 0], targets 1; and 65520 rows of logits [0, 0]; in float16
Got: inf; and 0
Wanted: 30000; and log 2: sum and number of rows are divided in float16, which ends at 65504
Status: theirs, known
Tracker: https://github.com/pytorch/pytorch/issues/61523
Searched: "torch cross_entropy float16 mean reduction inf sum overflow CPU" in issues;
https://github.com/pytorch/pytorch/issues/91597 is the same of torch.mean on a CPU, closed since
"""

import sys

import torch

wrong = False
for rows, large, target in ((3, 30000.0, 1), (65520, 0.0, 0)):
    logits, targets = torch.tensor([[large, 0.0]] * rows), torch.full((rows,), target)
    wanted = torch.nn.functional.cross_entropy(logits, targets).item()
    got = torch.nn.functional.cross_entropy(logits.half(), targets).item()
    print(f"{rows} rows: got {got} in float16, wanted {wanted}")
    wrong |= not abs(got - wanted) <= 1e-3 * abs(wanted)
sys.exit(int(wrong))
