"""Adam and AdamW with fused=True on a CPU mix up elements where state and parameter have other strides.

Library: torch 2.13.0
Law: adamw_step/layout-changes-nothing
Where: torch:optimizer_restored
Input: a transposed parameter [[0, 0], [0, 0]], gradient [[1, -1], [-1, -1]], m and v contiguous, as after loading
Got: elements off the diagonal get one another's m
Wanted: what fused=False gives: the kernel walks through memory and does not look at strides (CUDA's raises)
Status: theirs, known
Tracker: https://github.com/pytorch/pytorch/issues/106951
Searched: "fused Adam CPU memory format strides exp_avg parameter non-contiguous wrong result" in issues; the threads
found are about the error that CUDA raises, https://github.com/pytorch/pytorch/issues/110758 too
"""

import sys

import torch

found = {}
for fused in (False, True):
    param = torch.zeros(2, 2).t()
    param.grad = torch.tensor([[1.0, -1.0], [-1.0, -1.0]]).t()
    adam = torch.optim.AdamW([param], lr=1.0, weight_decay=0.0, fused=fused, foreach=False)
    moments = {"exp_avg": torch.tensor([[0.0, 1.0], [0.0, 0.0]]), "exp_avg_sq": torch.ones(2, 2)}
    adam.state[param] = {"step": torch.tensor(0.0), **moments}
    adam.step()
    found[fused] = param.flatten().tolist()
print(f"got {found[True]} with fused, wanted {found[False]}, as without")
sys.exit(int(not torch.allclose(torch.tensor(found[True]), torch.tensor(found[False]), atol=1e-5)))
