"""Laws of embedding."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_different, expect_same
from veriformer.law import law
from veriformer.properties.rows_cases import embedding_cases
from veriformer.subject import Subject


def one_hot(ids: np.ndarray, rows: int) -> np.ndarray:
    """A 1 at each id, [number of ids, rows]."""
    return (ids.reshape(-1, 1) == np.arange(rows)).astype(float)


def whole_cotangent(case: Case) -> np.ndarray:
    """A cotangent of small whole numbers, whose sums every dtype holds exactly."""
    most = np.bincount(case["ids"].reshape(-1)).max(initial=1)
    top = max(1, min(3, 200 // int(most)))
    return case.random(3).integers(-top, top + 1, (*case["ids"].shape, case.size("d"))).astype(float)


def gradient_of_table(embedding: Subject, case: Case) -> np.ndarray | None:
    """The gradient with respect to the table, for that cotangent."""
    found: np.ndarray | None = embedding.gradients(case, ("table",), whole_cotangent(case))["table"]
    return found


@law(
    "embedding",
    case=embedding_cases(),
    source="R41",
    relative=False,
    kills=(
        "embedding.py:counts_from_one",
        "embedding.py:last_row_never",
        "embedding.py:table_transposed",
        "embedding.py:scaled_by_root_d",
        "embedding.py:rows_in_half",
        "embedding.py:rows_normalised",
        "embedding.py:padding_row_is_zero",
        "embedding.py:position_added",
    ),
)
def is_one_hot_times_table(embedding: Subject, case: Case) -> None:
    """Each id gives the row of the table that it names, bit for bit."""
    got = embedding(case)
    # Each product has a single entry that is not 0, so this sum is exact.
    expect_same(got.reshape(-1, case.size("d")), one_hot(case["ids"], case.size("V")) @ case["table"])


@law(
    "embedding",
    case=embedding_cases(),
    source="R42, R77",
    relative=False,
    kills=("embedding.py:ids_in_four_bits", "embedding.py:scaled_by_root_d", "embedding.py:counts_from_one"),
)
def identity_table_shows_the_ids(embedding: Subject, case: Case) -> None:
    """A table whose row r holds r, or is 1 at r, gives the ids back; so none is taken for another."""
    rows = case.size("V")
    numbered = case.with_arrays(table=np.stack([np.arange(rows) % 128, np.arange(rows) // 128], -1))
    expect_same(embedding(numbered) @ [1.0, 128.0], case["ids"])
    if rows <= 64:
        unit = case.with_arrays(table=np.eye(rows))
        expect_same(embedding(unit).reshape(-1, rows), one_hot(case["ids"], rows))


@law(
    "embedding",
    case=embedding_cases(),
    source="R77",
    relative=False,
    kills=("embedding.py:ids_in_four_bits", "embedding.py:last_row_never", "embedding.py:first_row_is_special"),
)
def ids_are_only_names(embedding: Subject, case: Case) -> None:
    """Ids renamed together with the rows of the table, and with padding_index, give the same result."""
    order = case.random().permutation(case.size("V"))
    names = np.argsort(order)
    renamed = case.with_arrays(ids=names[case["ids"]], table=case["table"][order])
    if case["padding_index"] is not None:
        renamed = renamed.with_keywords(padding_index=int(names[case["padding_index"]]))
    expect_same(embedding(renamed), embedding(case))


@law(
    "embedding",
    case=embedding_cases(),
    source="R02, R05",
    relative=False,
    kills=("embedding.py:position_added", "embedding.py:repeats_get_zeros", "embedding.py:first_axis_only"),
)
def each_id_by_itself(embedding: Subject, case: Case) -> None:
    """Ids in another order, or cut into other axes, have the same rows."""
    ids, width = case["ids"].reshape(-1), case.size("d")
    order = case.random().permutation(ids.size)
    got = embedding(case).reshape(-1, width)[order]
    for shape in ((-1,), (1, -1, 1)):
        moved = embedding(case.with_arrays(ids=ids[order].reshape(shape)))
        expect_same(moved.reshape(-1, width), got)


@law(
    "embedding",
    case=embedding_cases(padding=True),
    needs={"padding_index"},
    source="R41, B081, B091",
    relative=False,
    kills=("embedding.py:padding_row_is_zero", "embedding.py:no_padding_means_all"),
)
def padding_index_changes_no_value(embedding: Subject, case: Case) -> None:
    """padding_index has no part in the result."""
    expect_same(embedding(case), embedding(case.with_keywords(padding_index=None)))


@law(
    "embedding",
    case=embedding_cases(padding=False),
    kind="gradient",
    needs={"gradients"},
    source="R41",
    relative=False,
    kills=(
        "rows_vjp.py:embedding_last_repeat_wins",
        "rows_vjp.py:embedding_mean_of_repeats",
        "rows_vjp.py:embedding_no_padding_means_all",
        "rows_vjp.py:embedding_first_batch_only",
        "rows_gradient.py:embedding_last_repeat_wins",
        "rows_gradient.py:embedding_scaled_in_backward",
    ),
)
def gradient_gathers_by_id(embedding: Subject, case: Case) -> None:
    """A row of the table gets the sum of the cotangents of its ids, each repeat once, and 0 where no id names it."""
    gradient, cotangent = gradient_of_table(embedding, case), whole_cotangent(case)
    if gradient is not None:
        wanted = one_hot(case["ids"], case.size("V")).T @ cotangent.reshape(-1, case.size("d"))
        expect_same(gradient, wanted, what="the gradient of table")


@law(
    "embedding",
    case=embedding_cases(padding=True),
    kind="gradient",
    needs={"gradients", "padding_index"},
    source="R41, B083",
    relative=False,
    kills=(
        "rows_vjp.py:embedding_padding_row_is_trained",
        "rows_vjp.py:embedding_padding_row_is_trained_when_many",
        "rows_vjp.py:embedding_padding_hides_its_neighbour",
        "rows_gradient.py:embedding_padding_row_is_trained",
    ),
)
def padding_row_gets_no_gradient(embedding: Subject, case: Case) -> None:
    """The row padding_index gets a gradient of exactly 0, and every other row its own."""
    gradient, cotangent = gradient_of_table(embedding, case), whole_cotangent(case)
    if gradient is not None and case["padding_index"] is not None:
        wanted = one_hot(case["ids"], case.size("V")).T @ cotangent.reshape(-1, case.size("d"))
        wanted[case["padding_index"]] = 0.0
        expect_same(gradient, wanted, what="the gradient of table")


@law(
    "embedding",
    case=embedding_cases(padding=False),
    kind="gradient",
    needs={"gradients"},
    source="R09, R17",
    relative=False,
    kills=("rows_vjp.py:embedding_no_padding_means_all", "rows_vjp.py:embedding_first_batch_only"),
)
def every_used_row_is_trained(embedding: Subject, case: Case) -> None:
    """For a cotangent of ones every row that some id names gets a gradient."""
    gradient = embedding.gradients(case, ("table",))["table"]
    if gradient is not None:
        used = np.unique(case["ids"])
        expect_different(gradient[used], 0.0, what="a row that an id names has a gradient")
