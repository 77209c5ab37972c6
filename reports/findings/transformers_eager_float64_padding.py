"""Left padding makes every logit NaN in float64 with attn_implementation="eager".

Library: transformers 5.24.0
Law: decoder_lm/left-padding-changes-nothing
Where: transformers:llama_eager*, transformers:mistral_eager*, transformers:gemma2_eager*
Input: any decoder with two layers in float64; input_ids [[0, 1, 2]], attention_mask [[0, 1, 1]]
Got: NaN at every position, the real tokens included
Wanted: the logits of [[1, 2]], as in float32 and as sdpa gives in float64 (padding changes nothing). The mask is
    finfo(float64).min, and eager attention takes its softmax in float32, where that is -inf: the row of the padding
    token is NaN, and in the next layer 0 * NaN reaches the tokens behind it.
Status: theirs, new
Tracker: none found
Searched: "float64 eager attention left padding NaN softmax float32 finfo min mask overflow -inf" in issues;
    "eager_attention_forward softmax dtype=torch.float32 double precision model NaN fully masked rows padding" in
    issues; "Llama model.double() float64 NaN logits with attention_mask padding eager" in issues
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = {"vocab_size": 5, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation="eager").double().eval()
tokens, mask = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, 1]])
with torch.no_grad():
    got = model(tokens, attention_mask=mask, position_ids=torch.tensor([[0, 0, 1]])).logits[:, 1:]
    wanted = model(tokens[:, 1:]).logits
print("got", got[0, -1].tolist())
print("wanted", wanted[0, -1].tolist())
sys.exit(int(not torch.allclose(got, wanted, atol=1e-5)))
