"""The encoder-decoder: which tokens reach which logits, what padding does, and how the two stacks are connected."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_different, expect_same
from veriformer.law import choice, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.properties.transformer_cases import transformer_cases
from veriformer.properties.transformer_changes import (
    changed,
    counting,
    embedded,
    even,
    handed,
    head_of,
    layers,
    normed,
    one_row,
    padded,
    plain_channels,
    powers_of_two,
    real_tokens,
    reordered,
    row_of_ones,
    scored,
    silent,
    small_numbers,
    sounding,
    with_plain_head,
)
from veriformer.subject import Subject

PRE = {"norm", "pre_norm"}


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/transformer.py."""
    return tuple(f"transformer.py:{name}" for name in names)


# padding and batches


@law(
    "transformer",
    case=transformer_cases(hidden=True, least={"Vs": 2}),
    pick=PICKS,
    needs={"mask"},
    source="P87, R48",
    relative=False,
    changes=("leak",),
    kills=faults("encoder_mask_ignored", "cross_mask_ignored", "mask_of_queries", "mask_inverted"),
)
def padding_has_no_influence(transformer: Subject, case: Case, pick: int) -> None:
    """Whatever tokens stand where mask is False, the logits are the same."""
    other = (case["source"] + 1 + pick % (case.size("Vs") - 1)) % case.size("Vs")
    expect_unmoved(transformer, case, case.with_arrays(source=np.where(case["mask"], case["source"], other)))


@law(
    "transformer",
    case=transformer_cases(),
    count=choice(1, 2, 3),
    needs={"mask"},
    source="P87, corpus item 24",
    kills=faults("padding_zeroed_not_hidden", "encoder_mask_ignored", "scores_grow_with_length"),
)
def padding_behind_changes_nothing(transformer: Subject, case: Case, count: int) -> None:
    """A source made longer by padding gives the same logits."""
    expect_equal(measure(transformer, padded(case, count)), measure(transformer, case))


@law(
    "transformer",
    case=transformer_cases(positions=(None, None, "rotary", None, "alibi")),
    count=choice(1, 2, 3),
    needs={"mask", "positions"},
    source="R44, P72",
    kills=faults("sinusoids_always", "padding_zeroed_not_hidden"),
)
def padding_in_front_changes_nothing(transformer: Subject, case: Case, count: int) -> None:
    """Padding in front of the source gives the same logits where positions count only by their distance."""
    expect_equal(measure(transformer, padded(case, count, front=True)), measure(transformer, case))


@law(
    "transformer",
    case=transformer_cases(mask=True),
    needs={"mask"},
    source="P53",
    kills=faults("mask_inverted"),
)
def all_true_mask_changes_nothing(transformer: Subject, case: Case) -> None:
    """A mask that calls every source token real gives what no mask gives."""
    whole = case.with_arrays(mask=np.ones_like(case["mask"]))
    expect_equal(measure(transformer, whole), measure(transformer, case.with_arrays(mask=None)))


@law(
    "transformer",
    case=transformer_cases(least={"B": 2}),
    pick=PICKS,
    source="P87, R02",
    changes=("batch_invariant",),
    kills=faults(
        "mask_of_the_first_row", "memory_of_the_next_row", "cross_mask_of_the_next_row", "cut_to_the_first_row"
    ),
)
def batch_rows_are_independent(transformer: Subject, case: Case, pick: int) -> None:
    """A source and its target alone give the logits that they give among others."""
    b = pick % len(case["source"])
    if transformer.capabilities.batch_invariant:
        expect_same(transformer(one_row(case, b)), transformer(case)[b : b + 1])
    else:
        expect_equal(measure(transformer, one_row(case, b)), measure(transformer, case)[b : b + 1])


# from the source to the logits


@law(
    "transformer",
    case=transformer_cases(least={"Vs": 2}, examples=6),
    pick=PICKS,
    needs=PRE,
    source="P89, R48, corpus item 24",
    relative=False,
    kills=faults("cross_causal", "cross_sees_the_first_token_alone", "memory_forgotten_at_equal_lengths"),
)
def every_logit_sees_every_real_source_token(transformer: Subject, case: Case, pick: int) -> None:
    """With all real tokens weighing the same, another one in place of any of them moves every logit of its row."""
    lit = counting(
        plain_channels(even(sounding(case, "cross_attention"), "cross_attention"), "cross_attention"), "source"
    )
    places = np.argwhere(real_tokens(case))
    b, s = places[[-1, 0, pick % len(places)][pick % 3]]
    source = case["source"].copy()
    source[b, s] = (source[b, s] + 1) % case.size("Vs")
    moved = transformer(lit.with_arrays(source=source))
    expect_different(moved[b], transformer(lit)[b], what="the source token has an influence")


@law(
    "transformer",
    case=transformer_cases(),
    needs=PRE,
    source="P52, P88",
    kills=faults(
        "cross_sees_the_first_token_alone",
        "cross_mask_ignored",
        "memory_for_the_first_layer_alone",
        "positions_skip_padding",
        "source_without_positions",
        "alpha_in_pre_norm_too",
    ),
)
def real_source_tokens_weigh_the_same(transformer: Subject, case: Case) -> None:
    """With zero queries and nothing else sounding, each of n real source tokens weighs 1/n, and padding nothing."""
    lit = even(sounding(case, "cross_attention"), "cross_attention")
    x, y, real = embedded(lit, "source"), embedded(lit, "target"), real_tokens(case)[..., None]
    mean = (x * real).sum(1, keepdims=True) / real.sum(1, keepdims=True)
    y = y + sum(handed(lit, f"{layer}cross_attention.", mean) for layer in layers(lit, "decoder"))
    expect_equal(measure(transformer, lit), scored(lit, y))


@law(
    "transformer",
    case=transformer_cases(positions=(None,), least={"S": 2}),
    pick=PICKS,
    needs={"positions"},
    source="P49, P88",
    kills=faults("encoder_causal", "sinusoids_always", "cross_sees_the_first_token_alone"),
)
def order_of_the_source_needs_positions(transformer: Subject, case: Case, pick: int) -> None:
    """Without positions, source tokens in another order, and the mask with them, give the same logits."""
    order = reordered(case["source"].shape[1], pick)
    moved = case.with_arrays(source=case["source"][:, order])
    moved = moved if case["mask"] is None else moved.with_arrays(mask=case["mask"][:, order])
    expect_equal(measure(transformer, moved), measure(transformer, case))


@law(
    "transformer",
    case=transformer_cases(positions=("sinusoidal",), least={"S": 2, "d": 2, "Vs": 2}, mask=False, examples=6),
    pick=PICKS,
    needs=PRE,
    source="P41, P88",
    relative=False,
    kills=faults("source_without_positions"),
)
def order_of_the_source_matters_with_positions(transformer: Subject, case: Case, pick: int) -> None:
    """With sinusoids, logits change when two different source tokens change places."""
    lit = counting(plain_channels(sounding(case, "cross_attention"), "cross_attention", 1), "source", 1)
    for layer in layers(lit, "decoder"):  # queries of ones, and channel 0, which tells positions alone, as the keys
        names = {name: f"{layer}cross_attention.{name}" for name in ("wq", "wk")}
        lit = lit.with_arrays(**{name: row_of_ones(lit[name], 0) for name in names.values()})
        norm = {f"{layer}norm2.weight": np.zeros(case.size("d")), f"{layer}norm2.bias": np.ones(case.size("d"))}
        lit = lit.with_arrays(**norm)
    source = case["source"].copy()
    first, second = pick % (source.shape[1] - 1), source.shape[1] - 1
    source[:, first], source[:, second] = 0, case.size("Vs") - 1
    swapped = source.copy()
    swapped[:, [first, second]] = source[:, [second, first]]
    before, after = (transformer(lit.with_arrays(source=tokens)) for tokens in (source, swapped))
    expect_different(after, before, what="the order of the source matters")


@law(
    "transformer",
    case=transformer_cases(positions=(None,), examples=6),
    needs={"positions"},
    source="P88",
    kills=faults("scores_grow_with_length", "encoder_causal"),
)
def repeated_source_changes_nothing(transformer: Subject, case: Case) -> None:
    """Without positions, a source and its mask given twice over have the logits of the source once."""
    names = [name for name in ("source", "mask") if case[name] is not None]
    twice = case.with_arrays(**{name: np.concatenate([case[name]] * 2, 1) for name in names})
    expect_equal(measure(transformer, twice), measure(transformer, case))


@law(
    "transformer",
    case=transformer_cases(positions=("alibi",), least={"S": 2}, examples=6),
    needs={"positions"},
    source="P46",
    kills=faults("alibi_signed_in_the_encoder", "encoder_causal"),
)
def alibi_reads_the_source_either_way(transformer: Subject, case: Case) -> None:
    """The encoder's distances have no direction: a source read backwards gives the same logits."""
    names = [name for name in ("source", "mask") if case[name] is not None]
    back = case.with_arrays(**{name: case[name][:, ::-1] for name in names})
    expect_equal(measure(transformer, back), measure(transformer, case))


# from the target to the logits


@law(
    "transformer",
    case=transformer_cases(least={"T": 2, "V": 2}),
    pick=PICKS,
    source="P50, P89",
    relative=False,
    changes=("leak",),
    kills=faults("target_sees_the_future", "target_sees_one_ahead"),
)
def future_has_no_influence(transformer: Subject, case: Case, pick: int) -> None:
    """The logits at i depend on the target up to i alone."""
    length = case["target"].shape[1]
    now = pick % (length - 1)
    other = np.where(np.arange(length) > now, (case["target"] + 1) % case.size("V"), case["target"])
    expect_unmoved(transformer, case, case.with_arrays(target=other), np.s_[:, : now + 1])


@law(
    "transformer",
    case=transformer_cases(positions=("sinusoidal", None, "sinusoidal", "rotary")),
    needs=PRE,
    source="P52, P89",
    kills=faults(
        "target_sees_itself_alone", "target_masked_like_the_source", "target_sees_the_future", "target_sees_one_ahead"
    ),
)
def target_tokens_up_to_now_weigh_the_same(transformer: Subject, case: Case) -> None:
    """With zero queries and nothing else sounding, target tokens 0 to i weigh 1/(i + 1) each at i, whatever mask is."""
    lit = even(sounding(case, "attention"), "attention")
    y = embedded(lit, "target")
    for layer in layers(lit, "decoder"):
        seen = normed(lit, y, f"{layer}norm1.").cumsum(1) / np.arange(1, y.shape[1] + 1)[:, None]
        y = y + handed(lit, f"{layer}attention.", seen)
    expect_equal(measure(transformer, lit), scored(lit, y))


@law(
    "transformer",
    case=transformer_cases(least={"V": 2}, examples=6),
    pick=PICKS,
    needs=PRE,
    source="P89, B072",
    relative=False,
    kills=faults("target_shifted_again"),
)
def target_token_moves_its_own_logits(transformer: Subject, case: Case, pick: int) -> None:
    """Another target token at i moves every logit at i: the target is not shifted once more."""
    lit, i = counting(with_plain_head(sounding(case)), "target"), pick % case["target"].shape[1]
    target = case["target"].copy()
    target[:, i] = (target[:, i] + 1) % case.size("V")
    moved = transformer(lit.with_arrays(target=target))
    expect_different(moved[:, i], transformer(lit)[:, i], what="the target token has an influence")


# how the stacks are connected


@law(
    "transformer",
    case=transformer_cases(encoder_norm=False, least={"decoder": 2, "encoder": 2}, pre=True, examples=4),
    pick=PICKS,
    needs=PRE | {"biases"},
    source="P90",
    kills=faults("decoder_sees_the_encoders_input", "decoder_layer_sees_its_encoder_layer", "memory_normed_again"),
)
def every_decoder_layer_sees_the_last_encoder_layer(transformer: Subject, case: Case, pick: int) -> None:
    """A constant c that the last encoder layer adds counts like c wk and c wv added to keys and values everywhere."""
    c = small_numbers(case.size("d"), pick)
    name = f"{layers(case, 'encoder')[-1]}feed_forward.b2"
    case = case.with_arrays(**{name: np.zeros_like(c)})
    outside = case
    for prefix in (f"{layer}cross_attention." for layer in layers(case, "decoder")):
        for bias, matrix in ((f"{prefix}bk", f"{prefix}wk"), (f"{prefix}bv", f"{prefix}wv")):
            before = 0.0 if case[bias] is None else case[bias]
            outside = outside.with_arrays(**{bias: before + c @ case[matrix]})
    expect_equal(measure(transformer, case.with_arrays(**{name: c})), measure(transformer, outside))


@law(
    "transformer",
    case=transformer_cases(encoder_norm=True),
    pick=PICKS,
    source="P90, corpus E42",
    kills=faults("encoder_norm_missing", "encoder_norm_twice"),
)
def encoder_norm_comes_before_cross_attention(transformer: Subject, case: Case, pick: int) -> None:
    """Channels of the encoder's final norm scaled, and rows of every decoder layer's wk and wv back, change nothing."""
    factors = powers_of_two(case.size("d"), pick)
    moved = changed(case, "params.encoder.norm.", lambda array: array * factors, "weight", "bias")
    for layer in layers(case, "decoder"):
        moved = changed(moved, f"{layer}cross_attention.", lambda array: array / factors[:, None], "wk", "wv")
    expect_equal(measure(transformer, moved), measure(transformer, case))


@law(
    "transformer",
    case=transformer_cases(decoder_norm=True, tied=False),
    pick=PICKS,
    source="corpus E42, R46",
    kills=faults("decoder_norm_missing", "decoder_norm_twice"),
)
def decoder_norm_comes_before_the_head(transformer: Subject, case: Case, pick: int) -> None:
    """Channels of the decoder's final norm scaled, and the rows of the head back, change nothing."""
    factors = powers_of_two(case.size("d"), pick)
    moved = changed(case, "params.decoder.norm.", lambda array: array * factors, "weight", "bias")
    moved = moved.with_arrays(**{"params.head.w": head_of(case)[0] / factors[:, None]})
    expect_equal(measure(transformer, moved), measure(transformer, case))


@law(
    "transformer",
    case=transformer_cases(pre=False, least={"Vs": 2, "V": 2, "d": 2}),
    pick=PICKS,
    needs={"alpha", "post_norm"},
    source="P79",
    relative=False,
    changes=("leak",),
    kills=faults("alpha_of_the_encoder_for_both", "alpha_pair_swapped", "one_alpha_for_the_encoder_alone"),
)
def alpha_is_one_number_or_one_for_each_stack(transformer: Subject, case: Case, pick: int) -> None:
    """A pair is (encoder, decoder): with 0 and a silent last sublayer a stack forgets its tokens; a number is both."""
    for name, pair in (("encoder", (0.0, 1.5)), ("decoder", (1.5, 0.0))):
        mute = silent(case, layers(case, name)[-1], ("feed_forward",)).with_keywords(alpha=pair)
        tokens = {"source": (case["source"] + 1) % case.size("Vs")}
        if name == "decoder":
            tokens["target"] = (case["target"] + 1) % case.size("V")
        expect_unmoved(transformer, mute, mute.with_arrays(**tokens))
    expect_same(transformer(case.with_keywords(alpha=1.5)), transformer(case.with_keywords(alpha=(1.5, 1.5))))
