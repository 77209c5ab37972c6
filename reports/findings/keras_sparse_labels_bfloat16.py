"""SparseCategoricalCrossentropy of dtype bfloat16 makes label 257 of it 256, of float16 label 2049 2048.

Library: keras 3.15.1
Law: cross_entropy/equals-the-reference, cross_entropy/*
Where: keras_torch:sparse, keras_jax:sparse
Input: logits of 300 zeros but for a 10 at 257, label 257, dtype="bfloat16", from_logits=True
Got: 10: the labels are made bfloat16, in which 257 is not
Wanted: 0.0135, as with dtype="float32" (a label is a number of a class, and not rounded)
Status: theirs, known
Backends: torch, jax
Tracker: https://github.com/keras-team/keras/issues/15012
Searched: "keras SparseCategoricalCrossentropy mixed precision bfloat16 float16 y_true cast class index above 256 wrong
label" in issues; the thread is of Keras 2, where it was mended
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras
import numpy as np

logits = np.zeros((1, 300), np.float32)
logits[0, 257] = 10
label = np.array([257])
got, wanted = (
    float(keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=dtype)(label, logits))
    for dtype in ("bfloat16", "float32")
)
print(f"got {got}, wanted {wanted}")
sys.exit(abs(got - wanted) > 0.1)
