"""scaled_sinu_pos_emb takes no positions of its own for each sample, so that left-padded prompts raise.

Library: x-transformers 2.31.10
Law: decoder_lm/left-padding-changes-nothing, decoder_lm/masked-tokens-have-no-influence,
decoder_lm/defaults-may-be-said
Where: x_transformers:decoder_sinusoidal
Input: TransformerWrapper(scaled_sinu_pos_emb=True), tokens [[0, 1, 2]], seq_start_pos=[1] (as generate(prompt_lens=))
Got: RuntimeError from einsum('i, j -> i j') on positions[B, T]
Wanted: the logits of [[1, 2]] at its tokens: the positions that ScaledSinusoidalEmbedding itself makes of
seq_start_pos have two axes
Status: theirs, new
Tracker: none found
Searched: "x-transformers scaled_sinu_pos_emb seq_start_pos einsum error prompt_lens generate" in issues;
"x-transformers alibi custom positions pos with kv cache shape mismatch forward_custom_pos" in issues
"""

import sys

import torch
from x_transformers import Decoder, TransformerWrapper

torch.manual_seed(0)
layers = Decoder(dim=16, depth=1, heads=2, attn_dim_head=8)
model = TransformerWrapper(num_tokens=5, max_seq_len=8, attn_layers=layers, scaled_sinu_pos_emb=True).eval()
tokens = torch.tensor([[0, 1, 2]])
with torch.no_grad():
    wanted = model(tokens[:, 1:])
    try:
        got = model(tokens, seq_start_pos=torch.tensor([1]))[:, 1:]
    except RuntimeError as error:
        print(f"got RuntimeError: {error}")
        print(f"wanted {wanted[0, -1].tolist()}")
        sys.exit(1)
print(f"got {got[0, -1].tolist()}, wanted {wanted[0, -1].tolist()}")
sys.exit(int(not torch.allclose(got, wanted, atol=1e-4)))
