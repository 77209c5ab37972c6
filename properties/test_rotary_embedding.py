"""Laws of rotary_embedding. A row is what stands at one token: the last axis of x."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case, round_to
from veriformer.expect import expect, expect_close, expect_different, expect_same
from veriformer.law import choice, law
from veriformer.properties.measured import expect_equal, measure
from veriformer.properties.position_cases import FAR, rotary_embedding_cases
from veriformer.properties.rotations import angles_between, members, mirrored, products, squares, turned_error
from veriformer.properties.rows import expect_unmoved, uneven, with_other_rows_changed
from veriformer.subject import Subject

MODERATE = ("normal", "integers", "one_hot", "halves", "heavy", "sparse", "constant")


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(tokens=2, families=MODERATE),
    steps=choice(1, 13, 300, 2048, FAR - 1),
    source="Su et al. 2021, section 3.2.2; P43, A059, A061",
    kills=(
        "rotary.py:pairs_repeated_for_halves",
        "rotary.py:angles_in_half",
        "rotary.py:table_wraps",
        "rotary.py:position_saturates",
        "rotary.py:positions_in_input_dtype",
    ),
)
def scores_depend_on_the_distance(rotary_embedding: Subject, case: Case, steps: int) -> None:
    """The product of two turned rows stays the same when both positions move on by the same number."""
    before = products(measure(rotary_embedding, case))
    after = products(measure(rotary_embedding, case.with_arrays(positions=case["positions"] + steps)))
    expect_equal(after, before)


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(),
    source="Su et al. 2021, section 3.2.2; P43",
    relative=False,
    changes=("rotary_pairs",),
    kills=(
        "rotary.py:interleaved_undeclared",
        "rotary.py:minus_missing",
        "rotary.py:exponent_per_channel",
        "rotary.py:tail_blank",
        "rotary.py:tables_in_half",
        "rotary.py:first_member_overwritten",
    ),
)
def pairs_keep_their_length(rotary_embedding: Subject, case: Case) -> None:
    """Each pair of channels (j and j + D/2, or as declared) keeps the sum of its squares."""
    found = squares(*members(measure(rotary_embedding, case), rotary_embedding.capabilities))
    first, second = members(case["x"], rotary_embedding.capabilities)
    expect_close(found.value, first**2 + second**2, found.allowed, what="the sum of squares of a pair is")


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(walks=("zero", "counting", "padded", "restarting")),
    source="Su et al. 2021, section 3.2.2; P43",
    relative=False,
    kills=(
        "rotary.py:positions_from_one",
        "rotary.py:sine_and_cosine_swapped",
        "rotary.py:reflected",
        "rotary.py:input_in_half",
        "rotary.py:positions_ignored",
    ),
)
def position_zero_changes_nothing(rotary_embedding: Subject, case: Case) -> None:
    """A row at position 0 comes back bit for bit."""
    still = case["positions"] == 0
    expect_same(rotary_embedding(case)[..., still, :], case["x"][..., still, :])


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(walks=("one", "counting", "one", "shuffled", "restarting")),
    source="Su et al. 2021, section 3.2.2; R43",
    relative=False,
    changes=("rotary_pairs",),
    kills=(
        "rotary.py:turned_backwards",
        "rotary.py:exponent_halved",
        "rotary.py:wavelengths_squared",
        "rotary.py:exponent_over_pairs_less_one",
        "rotary.py:exponent_from_one",
        "rotary.py:positions_doubled",
        "rotary.py:second_half_left_alone",
        "rotary.py:base_ignored",
        "rotary.py:interleaved_undeclared",
    ),
)
def pair_j_turns_by_its_own_angle(rotary_embedding: Subject, case: Case) -> None:
    """At position 1 pair j is turned by the angle base^(-2j / D)."""
    rows, capabilities = case["positions"] == 1, rotary_embedding.capabilities
    x, half = case["x"][..., rows, :], case.size("D") // 2
    found = angles_between(x, measure(rotary_embedding, case)[..., rows, :], capabilities)
    some = np.logical_or(*members(x, capabilities))
    wanted = np.broadcast_to(case["base"] ** (-np.arange(half) / half), some.shape)
    expect_close(found.value[some], wanted[some], found.allowed[some], what="the angle of a pair at position 1 is")


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(tokens=2),
    source="R05, A067",
    kills=(
        "rotary.py:positions_ignored",
        "rotary.py:positions_from_the_first",
        "rotary.py:positions_sorted",
        "rotary.py:first_token_left_out",
    ),
)
def tokens_turn_by_their_own_position(rotary_embedding: Subject, case: Case) -> None:
    """Tokens in another order, with their positions, give the same rows in that order."""
    order = case.random().permutation(case.size("T"))
    moved = case.with_arrays(x=case["x"][..., order, :], positions=case["positions"][order])
    expect_equal(measure(rotary_embedding, moved), measure(rotary_embedding, case)[..., order, :])


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(),
    source="Su et al. 2021, section 3.2.2; P43",
    kills=("rotary.py:first_member_overwritten", "rotary.py:sine_and_cosine_swapped", "rotary.py:positions_from_one"),
)
def turns_add(rotary_embedding: Subject, case: Case) -> None:
    """A turn by one position and then by another is the turn by their sum."""
    more = case["positions"][::-1] + 1
    once = measure(rotary_embedding, case)
    twice = measure(rotary_embedding, case.with_arrays(x=once.value, positions=more))
    whole = measure(rotary_embedding, case.with_arrays(positions=case["positions"] + more))
    carried = turned_error(once.allowed, rotary_embedding.capabilities)
    expect_close(twice.value, whole.value, twice.allowed + whole.allowed + carried, largest=rotary_embedding.largest)


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(),
    source="P43",
    changes=("rotary_pairs",),
    kills=("rotary.py:clipped", "rotary.py:reflected", "rotary.py:first_member_overwritten"),
)
def mirror_image_turns_back(rotary_embedding: Subject, case: Case) -> None:
    """With the members of each pair exchanged before and after, the same turn undoes itself."""
    capabilities = rotary_embedding.capabilities
    once = measure(rotary_embedding, case)
    back = measure(rotary_embedding, case.with_arrays(x=mirrored(once.value, capabilities)))
    carried = turned_error(once.allowed, capabilities)
    expect_close(mirrored(back.value, capabilities), case["x"], mirrored(back.allowed, capabilities) + carried)


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(families=("integers", "one_hot")),
    source="Su et al. 2021, section 3.2.2",
    kills=("rotary.py:added_to_the_input",),
)
def linear_in_x(rotary_embedding: Subject, case: Case) -> None:
    """The result for 2 x + z is twice the result for x plus the result for z."""
    other = case.random(1).integers(-3, 4, case["x"].shape)
    both = measure(rotary_embedding, case.with_arrays(x=2 * case["x"] + other))
    one, more = (measure(rotary_embedding, case.with_arrays(x=x)) for x in (case["x"], other))
    expect_close(both.value, 2 * one.value + more.value, both.allowed + 2 * one.allowed + more.allowed)


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(rows=2),
    source="R02",
    changes=("leak",),
    kills=("rotary.py:first_batch_row_for_all",),
)
def rows_are_independent(rotary_embedding: Subject, case: Case) -> None:
    """A row's result does not depend on the other rows."""
    changed, kept = with_other_rows_changed(case)
    expect_unmoved(rotary_embedding, case, changed, kept)


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(),
    source="R05, A064",
    kills=("rotary.py:heads_taken_for_tokens", "rotary.py:first_batch_row_for_all"),
)
def rank_changes_nothing(rotary_embedding: Subject, case: Case) -> None:
    """The axes before the tokens may be cut in any way: each is a batch."""
    tokens, width = case["x"].shape[-2:]
    wanted = measure(rotary_embedding, case).rearranged(lambda array: array.reshape(-1, tokens, width))
    for shape in ((-1, tokens, width), (1, -1, tokens, width), (1, 1, -1, 1, tokens, width)):
        got = measure(rotary_embedding, case.with_arrays(x=case["x"].reshape(shape)))
        expect_equal(got.rearranged(lambda array: array.reshape(-1, tokens, width)), wanted)


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(width=4, walks=("counting", "later", "jumps", "still"), tokens=2, families=MODERATE),
    other=choice(1000.0, 3.0, 1e6),
    needs={"base"},
    source="R09",
    kills=("rotary.py:base_ignored",),
)
def base_matters(rotary_embedding: Subject, case: Case, other: float) -> None:
    """Another base gives another result, but for the first pair and position 0."""
    changed = case.with_keywords(base=other)
    one, two = rotary_embedding.reference(case), rotary_embedding.reference(changed)
    sure = np.abs(one.value - two.value) > one.allowed + two.allowed
    expect_different(rotary_embedding(case)[sure], rotary_embedding(changed)[sure], what="another base has influence")


@law(
    "rotary_embedding",
    case=rotary_embedding_cases(tokens=2, width=4, layouts=("contiguous", "transposed", "strided")),
    kind="gradient",
    needs={"gradients"},
    source="P43, R14, R17",
    relative=False,
    changes=("rotary_pairs",),
    kills=(
        "rotary_gradient.py:no_gradient",
        "rotary_gradient.py:first_half_detached",
        "rotary_gradient.py:straight_through",
        "rotary_gradient.py:turned_forwards",
        "rotary_gradient.py:base_forgotten",
        "rotary_gradient.py:positions_forgotten",
        "rotary_gradient.py:angles_in_half",
        "rotary_gradient.py:interleaved_backward",
        "rotary_gradient.py:summed_over_the_batch",
        "rotary_gradient.py:last_token_left_out",
    ),
)
def gradient_turns_back(rotary_embedding: Subject, case: Case) -> None:
    """The gradient of x is the cotangent turned by the negative angle, which is a turn of its mirror image."""
    cotangent, capabilities = round_to(uneven(case), case.dtype), rotary_embedding.capabilities
    found = rotary_embedding.gradients(case, ("x",), cotangent)["x"]
    expect(found is not None, "no gradient", "no gradient reached x, wanted the cotangent turned back")
    back = measure(rotary_embedding, case.with_arrays(x=mirrored(cotangent, capabilities)))
    # the backward is a rotation too, so it has the budget of one
    expect_close(found, mirrored(back.value, capabilities), 2 * mirrored(back.allowed, capabilities))
