"""Causal attention with more queries than keys: the first rows see nothing, and get values all the same.

Library: x-transformers 2.31.10
Law: attention/equals-the-reference, attention/*, multi_head_attention/empty-row-is-as-declared
Where: x_transformers:attend, x_transformers:attend_*
Input: Attend(causal=True), three queries, two keys, values [1, 3], no mask
Got: first row 2 (the mean of all values, a later one among them); with flash=True rows 1, 2, 2
Wanted: 0, 1, 2: the triangle is at the bottom right (queries are the last ones), so row 0 sees nothing, as a row that
a mask empties gives 0. Only masks are searched for empty rows; flash hands is_causal to torch, which is top left.
Status: theirs, new
Tracker: none found
Searched: "lucidrains x-transformers causal cross attention query longer than key create_causal_mask triu row fully
masked average of values" in issues; "x-transformers flash attention causal argument ignored Attend" in issues
"""

import sys

import torch
from x_transformers.attend import Attend

q, k, v = torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 2, 1), torch.tensor([[[[1.0], [3.0]]]])
wanted, wrong = [0.0, 1.0, 2.0], False
for flash in (False, True):
    got = Attend(causal=True, flash=flash)(q, k, v)[0].flatten().tolist()
    print(f"flash={flash}: got {got}, wanted {wanted}")
    wrong |= got != wanted
sys.exit(int(wrong))
