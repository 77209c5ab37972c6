"""Wrong embeddings: one correct implementation with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Fault

FRAMEWORK = "numpy"


def _make(fault: str) -> Callable[..., NDArray]:
    def embedding(ids: NDArray, table: NDArray, *, padding_index: int | None = None) -> NDArray:
        table, (size, width) = _read(table, fault), table.shape
        if fault == "table_transposed" and size == width:
            table = table.T
        if fault in ("padding_row_is_zero", "no_padding_means_all"):
            table = table.copy()
            if padding_index is not None or fault == "no_padding_means_all":
                table[padding_index] = 0  # table[None] is the whole table
        if fault == "first_row_is_special":
            table = np.concatenate([table[:1] * 0, table[1:]])
        rows = table[_chosen(ids, size, fault)]
        return _changed(rows, ids, fault).astype(table.dtype)

    embedding.__qualname__ = f"embedding[{fault}]"
    return embedding


def _chosen(ids: NDArray, size: int, fault: str) -> NDArray:
    """The rows that are taken; an index outside the table is put back into it, where the real mistake reads beyond."""
    if fault == "counts_from_one":
        return np.clip(ids - 1, 0, size - 1)
    if fault == "ids_in_four_bits":
        return ids % 16
    if fault == "last_row_never":
        return np.minimum(ids, max(size - 2, 0))
    if fault == "first_axis_only" and ids.ndim > 1:
        return np.broadcast_to(ids[:1], ids.shape)
    return ids


def _read(table: NDArray, fault: str) -> NDArray:
    if fault != "reads_as_contiguous" or table.flags.c_contiguous:
        return table
    base = table
    while isinstance(base.base, np.ndarray):
        base = base.base
    start = (table.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // table.itemsize
    # np.resize repeats a buffer that is too short, where the real mistake reads foreign memory.
    return np.resize(base.ravel(order="K")[max(start, 0) :], table.shape)


def _changed(rows: NDArray, ids: NDArray, fault: str) -> NDArray:
    width = rows.shape[-1]
    if fault == "scaled_by_root_d":
        return rows * width**0.5
    if fault == "rows_in_half":
        return rows.astype(np.float16)
    if fault == "rows_normalised":
        size = np.sqrt((rows * rows).sum(axis=-1, keepdims=True))
        return rows / np.maximum(size, 1)
    if fault == "position_added":
        return rows + np.arange(rows.size // width).reshape(ids.shape)[..., None]
    if fault == "repeats_get_zeros":
        flat = ids.reshape(-1)
        first = np.array([i not in flat[:place] for place, i in enumerate(flat)]).reshape(ids.shape)
        return np.where(first[..., None], rows, 0)
    return rows


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "is-one-hot-times-table": {
        "counts_from_one": ("mutation: ids counted from 1", "the row before the one that is named"),
        "table_transposed": (
            "HF#48154: a weight in the other orientation",
            "columns for rows where the table is square",
        ),
        "rows_in_half": ("HF#38702", "rows are rounded to float16"),
        "rows_normalised": ("mutation: max_norm applied unasked", "rows longer than 1 are shortened"),
    },
    "identity-table-shows-the-ids": {
        "ids_in_four_bits": ("mutation: ids stored in too few bits", "id 16 is id 0"),
        "scaled_by_root_d": ("HF#43681", "multiplied by the root of d"),
    },
    "ids-are-only-names": {
        "last_row_never": ("mutation: the bound one too small", "the last row is never taken"),
        "first_row_is_special": ("mutation: id 0 taken for padding", "row 0 is zeros"),
    },
    "each-id-by-itself": {
        "position_added": ("mutation: positions added inside", "the position is added to the row"),
        "repeats_get_zeros": ("mutation: a row is moved, not copied", "a repeated id gets zeros"),
        "first_axis_only": ("unsloth#3699", "every batch has the ids of the first"),
    },
    "padding-index-changes-no-value": {
        "padding_row_is_zero": ("HF#10200", "the row padding_index is zeros in the result"),
        "no_padding_means_all": ("fairseq#4076", "without padding_index the whole table is zeros: table[None] = 0"),
    },
    "layout-changes-nothing": {
        "reads_as_contiguous": ("kernl#193", "a strided table is read as packed"),
    },
}
FAULTS = {
    variant: Fault("embedding", f"embedding/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"embedding": _make(variant)} for variant in ("correct", *FAULTS)}
