"""softmax_cross_entropy is NaN where a class that is nobody's target has the logit -inf.

Library: optax 0.2.8
Law: cross_entropy/equals-the-reference, cross_entropy/finite-on-plain-data,
cross_entropy/minus-infinity-equals-deletion
Where: optax:labels
Input: logits [0, -inf], labels [1, 0]; with labels of one_hot under jit in bfloat16 alone, for XLA makes a choice of
the product elsewhere
Got: nan
Wanted: 0, as softmax_cross_entropy_with_integer_labels and safe_softmax_cross_entropy give (a class of -inf that is
nobody's target counts as if the vocabulary did not have it)
Status: theirs, known
Tracker: https://github.com/google-deepmind/optax/issues/896
Searched: "optax softmax_cross_entropy NaN logits -inf masked class" in issues; safe_softmax_cross_entropy came of it
"""

import sys

import jax.numpy as jnp
import optax

logits, labels = jnp.array([0.0, -jnp.inf]), jnp.array([1.0, 0.0])
got = float(optax.losses.softmax_cross_entropy(logits, labels))
safe = float(optax.losses.safe_softmax_cross_entropy(logits, labels))
print(f"got {got}, wanted 0; safe_softmax_cross_entropy gives {safe}")
sys.exit(got != 0)
