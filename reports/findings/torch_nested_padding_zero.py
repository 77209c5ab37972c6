"""TransformerEncoder with nested tensors gives 0 for padding, where every other path calculates it as any token.

Library: torch 2.13.0
Law: encoder/equals-the-reference, encoder/silent-sublayers-leave-the-norms, encoder/seen-tokens-have-influence,
encoder/permutation-equivariance, encoder/padding-changes-nothing, encoder/batch-rows-are-independent
Where: torch:transformer_nested
Input: TransformerEncoder of one layer, two tokens, the second one padding; the outputs there
Got: 0 in eval mode without gradients
Wanted: what the same call gives with gradients enabled
Status: theirs, known
Tracker: https://github.com/pytorch/pytorch/issues/86120
Searched: "TransformerEncoder nested tensor padding output zero src_key_padding_mask eval different from train" in
issues
"""

import sys
import warnings

import torch

warnings.simplefilter("ignore")  # nested tensors are a prototype
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(2, 2, 2, dropout=0.0, batch_first=True)
encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()
x, padding = torch.randn(1, 2, 2), torch.tensor([[False, True]])
wanted = encoder(x, src_key_padding_mask=padding).detach()[0, 1]
with torch.no_grad():
    got = encoder(x, src_key_padding_mask=padding)[0, 1]
print(f"got {got.tolist()} without gradients, wanted {wanted.tolist()}, as with them")
sys.exit(int(not torch.allclose(got, wanted, atol=1e-5)))
