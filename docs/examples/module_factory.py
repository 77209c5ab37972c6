"""An nn.Module of torch, made anew for each set of sizes; veriformer sets its weights and judges gradients as well:

veriformer check multi_head_attention=docs/examples/module_factory.py:multi_head_attention
"""

import torch

import veriformer


class Attention(torch.nn.Module):
    """Attention of x to memory, by heads."""

    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.query = torch.nn.Linear(d_model, d_model)
        self.key_value = torch.nn.Linear(d_model, 2 * d_model)
        self.out = torch.nn.Linear(d_model, d_model)

    def forward(self, x, memory, attn_mask=None, is_causal=False):
        """x[B,Tq,d], memory[B,Tk,d] -> [B,Tq,d]; attn_mask[B,H,Tq,Tk] is boolean, True = may attend."""
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.key_value(memory).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        if is_causal:
            last = memory.shape[1] - x.shape[1]
            triangle = torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool).tril(last)
            attn_mask = triangle if attn_mask is None else attn_mask & triangle
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask)
        return self.out(mixed.transpose(1, 2).flatten(-2))


multi_head_attention = veriformer.torch_module(
    Attention,
    map={
        "wq": "query.weight.T",
        "wk": "key_value.weight[0:d].T",
        "wv": "key_value.weight[d:2*d].T",
        "wo": "out.weight.T",
        "bq": "query.bias",
        "bk": "key_value.bias[0:d]",
        "bv": "key_value.bias[d:2*d]",
        "bo": "out.bias",
    },
)
CAPABILITIES = {"multi_head_attention": veriformer.Capabilities(grouped_heads=False, value_width="equal", biases=True)}
