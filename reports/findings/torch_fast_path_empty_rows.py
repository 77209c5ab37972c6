"""The fast path of MultiheadAttention and TransformerEncoderLayer gives NaN for a row that sees nothing.

Library: torch 2.13.0
Law: multi_head_attention/empty-row-is-as-declared, encoder_layer/empty-row-is-as-declared,
decoder_layer/empty-row-is-as-declared
Where: torch:fast, torch:transformer_fast
Input: MultiheadAttention(2, 2, batch_first=True).eval(), one token, key_padding_mask [[True]], need_weights=False
Got: NaN under no_grad, where the fast path is taken
Wanted: the output projection's bias, as the same call gives with gradients enabled
Status: theirs, known
Tracker: https://github.com/pytorch/pytorch/pull/190486
Searched: "MultiheadAttention fast path NaN fully masked row key_padding_mask eval no_grad" in issues
"""

import sys

import torch

torch.manual_seed(0)
module = torch.nn.MultiheadAttention(2, 2, batch_first=True).eval()
x, hidden = torch.ones(1, 1, 2), torch.tensor([[True]])
wanted = module(x, x, x, key_padding_mask=hidden, need_weights=False)[0].detach()
with torch.no_grad():
    got = module(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
print(f"got {got.flatten().tolist()} without gradients, wanted {wanted.flatten().tolist()}, as with them")
sys.exit(int(not torch.equal(got, wanted)))
