"""Dialects of the Universal Transformer: loops, what each keeps of ACT, which may be cached and which not (3.13)."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from reference_models import close, converted
from universal_models import HEADS, random_states, random_universal, with_halting

from veriformer.declarations import PRESETS as DECLARED
from veriformer.reference import loops_universal
from veriformer.reference.universal import universal_transformer
from veriformer.reference.universal_decoding import universal_step
from veriformer.reference.universal_dialects import PRESETS, Dialect, universal_dialect

pytestmark = pytest.mark.filterwarnings("error")
DEEP = 5
VARIED = (4, 13)
"""Seeds with which positions halt at three steps or more."""
UNEVEN = (1, 6, 17, 20, 28, 34)
"""Seeds with which, in pre-norm, early tokens halt before later ones and the other way round."""
MEAN, EVOLVING, LAST = Dialect(), Dialect(state="evolve"), Dialect(state="evolve", output="last")
CAUSAL = {
    "copy, mean": MEAN,
    "copy, ema": Dialect(output="ema"),
    "copy, last": Dialect(output="last"),
    "copy, read before": Dialect(read="before"),
    "evolve, mean": EVOLVING,
    "evolve, ema": Dialect(state="evolve", output="ema"),
    **{name: PRESETS[name] for name in PRESETS if name != "t2t_global"},
}
"""Dialects in which what a token gives depends on those up to it."""
LEAKY = {"evolve, last": LAST, "global": Dialect(scope="global"), "t2t_global": PRESETS["t2t_global"]}
"""Dialects in which it depends on when others halt."""


def run(x, params, preset="default", **keywords):
    return universal_dialect(x, params, preset=preset, **{"heads": HEADS, "max_steps": DEEP, **keywords})


def alone(results, b):
    return tuple(result[b] for result in results)


# what it computes


@pytest.mark.parametrize("words", [{}, {"norm": "pre", "causal": True}, {"epsilon": 0.4, "max_steps": 2}])
@pytest.mark.parametrize("seed", VARIED)
def test_the_default_is_the_universal_transformer_bit_for_bit(seed, words):
    x, params = random_states(seed, 2, 5), random_universal(seed)
    mask = np.arange(5) < np.asarray([[5], [3]])
    wanted = universal_transformer(x, params, **{"heads": HEADS, "max_steps": DEEP, "mask": mask, **words})
    assert all(np.array_equal(a, b) for a, b in zip(run(x, params, mask=mask, **words), wanted, strict=True))


@pytest.mark.parametrize("name", [*PRESETS, *CAUSAL, *LEAKY])
@pytest.mark.parametrize("seed", VARIED)
def test_every_dialect_equals_the_loops(seed, name):
    how = (PRESETS | CAUSAL | LEAKY)[name]
    x, params = random_states(seed, 1, 5), random_universal(seed, cross=True)
    memory, mask = random_states(1, 1, 2), [[True, True, True, True, False]]
    for words in ({"max_steps": 4}, {"max_steps": 2, "norm": "pre"}, {"epsilon": 0.5, "max_steps": 3}):
        found = run(x, params, how, memory=memory, mask=np.asarray(mask), **words)
        words |= how._asdict() | {"memory": memory[0], "mask": mask[0], "heads": HEADS}
        out, steps, remainder = loops_universal.universal_transformer(x[0], params, **words)
        close(found[0][0], out, 1e-12)
        assert found[1][0].tolist() == steps
        np.testing.assert_allclose(found[2][0], remainder, rtol=0, atol=1e-12)


def test_every_preset_can_be_declared() -> None:
    assert tuple(PRESETS) == DECLARED


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("convert", [torch.from_numpy, strict.asarray], ids=["torch", "strict"])
def test_other_frameworks_give_the_same(convert, name):
    x, params, mask = random_states(4, 2, 4), random_universal(4), np.arange(4) < np.asarray([[4], [2]])
    wanted = run(x, params, name, mask=mask)
    found = run(convert(x), converted(convert, params), name, mask=convert(mask))
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 1e-12)
        assert str(one.dtype).rpartition(".")[2] == str(other.dtype)


def test_presets_differ_from_one_another():
    x, params = random_states(4, 1, 5), random_universal(4)
    outs = {name: run(x, params, name)[0] for name in PRESETS}
    for name, out in outs.items():
        assert all(np.abs(out - other).max() > 1e-3 for other_name, other in outs.items() if other_name != name), name


def test_the_nearest_preset_is_named():
    with pytest.raises(ValueError, match="got 't2t_accumulate', nearest is 't2t_accumulated'; wanted one of default, "):
        run(random_states(0, 1, 2), random_universal(), "t2t_accumulate")
    with pytest.raises(ValueError, match="got 'ponder', nearest is 'pondernet'"):
        run(random_states(0, 1, 2), random_universal(), "ponder")


# what becomes of the weights: P97, P98, P101


def constant(params, h):
    """A layer whose sublayers give 0, and a halting unit that says h: in pre-norm all states are the input."""
    layer = {name: {k: a * 0.0 if k in ("wo", "bo", "w2", "b2") else a for k, a in part.items()}
             for name, part in params["layer"].items()}  # fmt: skip
    return {"layer": layer} | {"halt": {"w": np.zeros((8, 1)), "b": np.asarray([np.log(h / (1 - h))])}}


@pytest.mark.parametrize("name", PRESETS)
def test_an_identity_layer_returns_its_input_where_weights_sum_to_one(name):
    how = PRESETS[name]._replace(position=None, step=None, again=False)
    x = random_states(4, 1, 3)
    for h, max_steps, sums in ((0.3, 6, {"ema": 1 - 0.7**3 * 0.9}), (0.1, 3, {"none": 0.3, "ema": 1 - 0.9**3})):
        out, steps, remainder = run(x, constant(random_universal(4), h), how, norm="pre", max_steps=max_steps)
        total = 1.0
        if how.output == "ema":
            total = sums["ema"]
        elif how.forced == "none":
            total = sums.get("none", 1.0)
        close(out, total * x, 1e-14)
        always = how.halting in ("never", "stick_breaking")
        assert (steps == (max_steps if always else min(max_steps, 4))).all()
        if how.halting == "act" and h == 0.1:
            assert np.allclose(remainder, 0.0 if how.forced == "none" else 0.8, rtol=0, atol=1e-15)


def test_pondernet_weighs_by_what_is_left_and_its_remainder_is_the_last_weight():
    out, steps, remainder = run(
        random_states(4, 1, 2), constant(random_universal(4), 0.25), "pondernet", norm="pre", max_steps=3
    )
    assert (steps == 3).all() and np.allclose(remainder, 0.75**2, rtol=0, atol=1e-15)


def test_without_halting_the_output_is_the_last_state_whatever_the_unit_says():
    x, params = random_states(4, 2, 4), random_universal(4)
    fixed, wanted = run(x, params, "fixed"), run(x, with_halting(params, -800.0))
    assert all(np.array_equal(a, b) for a, b in zip(fixed, wanted, strict=True))


def test_last_is_the_state_with_which_a_position_halted():
    x, params = random_states(4, 1, 6), random_universal(4)
    out, steps, _ = run(x, params, Dialect(output="last"), causal=True)
    for i in range(6):
        shorter = run(x, params, Dialect(output="last"), causal=True, max_steps=int(steps[0, i]))
        close(out[0, i], shorter[0][0, i], 1e-14)


def test_global_halting_is_one_number_of_the_real_tokens_of_a_sequence():
    x, params = random_states(4, 2, 6), random_universal(4)
    mask = np.arange(6) < np.asarray([[6], [3]])
    out, steps, remainder = run(x, params, "t2t_global", mask=mask)
    for b, length in enumerate((6, 3)):
        assert len(set(steps[b, :length].tolist())) == 1
        for got, wanted in zip((out, steps, remainder), run(x[b : b + 1, :length], params, "t2t_global"), strict=True):
            close(got[b : b + 1, :length], wanted, 1e-12)


def test_without_positions_tokens_may_come_in_any_order():
    x, params, order = random_states(4, 1, 6), random_universal(4), np.asarray([3, 0, 5, 1, 4, 2])
    for how in (PRESETS["graves"], Dialect(position=None)):
        for got, wanted in zip(run(x[:, order], params, how), run(x, params, how), strict=True):
            close(got, wanted[:, order], 1e-12)
    assert not np.allclose(run(x[:, order], params)[0], run(x, params)[0][:, order])


# section 3.13: future, prefix, cache


def moved_by_the_future(how, seed, norm):
    """How far the results of the first tokens move where the later ones change."""
    x, params = random_states(seed, 1, 7), random_universal(seed)
    other = np.concatenate([x[:, :4], -3 * x[:, 4:]], axis=1)
    one, two = (run(a, params, how, causal=True, norm=norm) for a in (x, other))
    return max(np.abs(a[:, :4] - b[:, :4]).max() for a, b in zip(one, two, strict=True))


def off_as_a_prefix(how, seed, norm):
    """How far the first tokens alone are from the first of all."""
    x, params = random_states(seed, 1, 7), random_universal(seed)
    whole = run(x, params, how, causal=True, norm=norm)
    parts = [run(x[:, :n], params, how, causal=True, norm=norm) for n in range(1, 7)]
    return max(np.abs(a[:, : b.shape[1]] - b).max() for part in parts for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("seed", VARIED)
@pytest.mark.parametrize("name", CAUSAL)
def test_where_each_position_halts_for_itself_the_future_does_not_matter(name, seed, norm):
    assert moved_by_the_future(CAUSAL[name], seed, norm) == 0.0
    assert off_as_a_prefix(CAUSAL[name], seed, norm) < 1e-12


@pytest.mark.parametrize("name", LEAKY)
def test_where_the_loop_s_length_or_a_mean_decides_the_future_leaks(name):
    """That no dialect of this kind passes is what makes the tests above worth anything."""
    assert max(moved_by_the_future(LEAKY[name], seed, "pre") for seed in UNEVEN) > 1e-2
    assert max(off_as_a_prefix(LEAKY[name], seed, "pre") for seed in UNEVEN) > 1e-2


def test_what_is_cached_is_right_for_copied_states_and_for_those_alone():
    off = {"copy": [], "evolve": []}
    for seed in UNEVEN:
        x, params = random_states(seed, 1, 7), random_universal(seed)
        cache, outs = None, []
        for i in range(7):
            (out, _, _), cache = universal_step(x[:, i : i + 1], cache, params, heads=HEADS, norm="pre", max_steps=DEEP)
            outs.append(out)
        for state, seen in off.items():
            whole, _, _ = run(x, params, Dialect(state=state), causal=True, norm="pre")
            seen.append(np.abs(np.concatenate(outs, axis=1) - whole).max())
    assert max(off["copy"]) < 1e-12 and max(off["evolve"]) > 1e-2
