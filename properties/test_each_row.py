"""What holds wherever rows do not meet: a row alone is the row in its batch."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_same
from veriformer.law import law
from veriformer.properties.every_case import by_operation
from veriformer.properties.measured import expect_equal, measure
from veriformer.subject import Subject


@law(
    ("layer_norm", "rms_norm", "feed_forward"),
    case=by_operation({}, rows=2),
    source="P20, P30, R02",
    changes=("batch_invariant",),
    kills=(
        "layer_norm.py:row_index_wraps",
        "layer_norm.py:whole_array",
        "rms_norm.py:row_index_wraps",
        "rms_norm.py:whole_array",
        "feed_forward.py:row_tail_dropped",
        "feed_forward.py:width_three_convolution",
    ),
)
def row_alone_is_the_row_in_its_batch(subject: Subject, case: Case) -> None:
    """A row given alone, as a vector, has the result it has among others; bit for bit if batch_invariant."""
    rows = case["x"].reshape(-1, case.size("d"))
    among = measure(subject, case).rearranged(lambda array: array.reshape(rows.shape))
    for i in np.unique([0, len(rows) // 2, len(rows) - 1]):
        alone = measure(subject, case.with_arrays(x=rows[i]))
        if subject.capabilities.batch_invariant:
            expect_same(alone.value, among.value[i])
        else:
            expect_equal(alone, among[i])
