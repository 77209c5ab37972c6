"""Wrong steps of AdamW: one correct implementation with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
LANES = 4
State = tuple[NDArray, NDArray, NDArray]


@dataclass
class _Words:
    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float


def _make(fault: str) -> Callable[..., State]:
    kept: dict[tuple[int, ...], NDArray] = {}

    def adamw_step(
        param: NDArray,
        grad: NDArray,
        m: NDArray,
        v: NDArray,
        step: int,
        *,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> State:
        words = _misread(_Words(step, lr, beta1, beta2, eps, weight_decay), param.dtype, fault)
        theta, g, mean, square = (a if a.dtype == np.float64 else a.astype(np.float32) for a in (param, grad, m, v))
        if fault == "state_ignored":
            mean, square = 0 * mean, 0 * square
        if fault == "state_kept_between_calls":
            mean = mean + kept.get(m.shape, 0 * mean)
        with np.errstate(all="ignore"):
            g = _gradient(theta, g, words, fault)
            new_mean, new_square = _averages(mean, square, g, words, fault)
            late = fault == "averages_used_before_the_step"
            update = _update(mean if late else new_mean, square if late else new_square, g, words, fault)
            moved = _tail(theta, _moved(theta, update, words, fault), fault)
        if fault == "state_kept_between_calls":
            kept[m.shape] = new_mean
        if fault == "averages_in_place":
            m[...] = new_mean.astype(m.dtype)
        if fault == "corrected_average_kept":
            new_mean = new_mean / (1 - words.beta1**words.step)
        return moved.astype(param.dtype), new_mean.astype(m.dtype), new_square.astype(v.dtype)

    adamw_step.__qualname__ = f"adamw_step[{fault}]"
    return adamw_step


def _misread(words: _Words, dtype: Any, fault: str) -> _Words:
    """The numbers of the step, as a mistake reads them."""
    t = words.step
    words.step = {
        "steps_counted_from_zero": max(t - 1, 1),
        "steps_counted_from_two": t + 1,
        "corrections_of_one_step_only": 1,
        "step_in_two_bytes": max(t % 65_536, 1),
        "step_ignored": 2,
        "step_in_half": min(t, 2048),
    }.get(fault, t)
    if fault == "betas_exchanged":
        words.beta1, words.beta2 = words.beta2, words.beta1
    if fault == "betas_ignored":
        words.beta1, words.beta2 = 0.9, 0.999
    if fault == "betas_in_bfloat16" and dtype == ml_dtypes.bfloat16:
        words.beta1, words.beta2 = (float(ml_dtypes.bfloat16(b)) for b in (words.beta1, words.beta2))
    words.eps = {
        "eps_missing": 0.0,
        "eps_ignored": 1e-8,
        "eps_scaled_by_the_rate": words.eps * words.lr,
        "eps_before_the_correction": words.eps / (1 - words.beta2**words.step) ** 0.5 if words.beta2 < 1 else 0.0,
    }.get(fault, words.eps)
    words.decay = {"decay_ignored": 0.0, "decay_twice": 2 * words.decay, "decay_grows": -words.decay}.get(
        fault, words.decay
    )
    if fault == "rate_at_least_a_thousandth":
        words.lr = max(words.lr, 1e-3)
    if fault == "rate_falls_with_the_step":
        words.lr = words.lr / (1 + 1e-7 * t)
    return words


def _gradient(theta: NDArray, g: NDArray, words: _Words, fault: str) -> NDArray:
    if fault == "decay_coupled":
        return g + g.dtype.type(words.decay) * theta
    if fault == "gradient_limited":
        return np.clip(g, -10, 10)
    if fault == "gradients_centred":
        return g - g.mean()
    return g * g.dtype.type(words.lr) if fault == "rate_in_the_average" else g


def _averages(mean: NDArray, square: NDArray, g: NDArray, words: _Words, fault: str) -> tuple[NDArray, NDArray]:
    beta1, beta2 = words.beta1, words.beta2
    seen = {"sign_of_the_gradient_lost": np.abs(g), "only_positive_gradients_average": np.maximum(g, 0)}.get(fault, g)
    new_mean = beta1 * mean + (1 if fault == "beta_of_m_forgotten" else 1 - beta1) * seen
    squares = (g - new_mean) ** 2 if fault == "variance_centred" else g * g
    new_square = beta2 * square + (1 - beta2) * squares
    if fault == "largest_for_mean":
        new_square = np.maximum(beta2 * square, squares)
    if fault == "variance_never_falls":
        new_square = np.maximum(square, new_square)
    if fault == "variance_in_half":
        new_square = new_square.astype(np.float16).astype(square.dtype)
    if fault == "variance_ignored":
        new_square = square
    if fault == "variance_of_the_row":
        new_square = new_square.mean(axis=-1, keepdims=True) + 0 * square
    if fault == "nesterov_kept":
        new_mean = beta1 * new_mean + (1 - beta1) * g
    return new_mean.astype(mean.dtype), new_square.astype(square.dtype)


def _update(mean: NDArray, square: NDArray, g: NDArray, words: _Words, fault: str) -> NDArray:
    """m / c1 over D, as it should be or nearly."""
    c1, c2 = 1 - words.beta1**words.step, 1 - words.beta2**words.step
    if fault in ("corrections_missing", "correction_of_m_missing"):
        c1 = 1.0
    if fault in ("corrections_missing", "correction_of_v_missing"):
        c2 = 1.0
    if fault == "corrections_exchanged":
        c1, c2 = c2, c1
    if fault == "correction_multiplies":
        c1 = 1 / c1
    variance = square / c2
    if fault == "one_variance_for_all":
        variance = np.full_like(variance, variance.mean())
    if fault == "eps_inside_the_root":
        return mean / c1 / np.sqrt(variance + words.eps)
    root = variance if fault == "root_missing" else np.sqrt(variance)
    update = mean / c1 / (root + words.eps)
    if fault == "first_rate_for_all" and update.size:
        return mean / c1 / (root.reshape(-1)[0] + words.eps)
    return np.clip(update, -1, 1) if fault == "move_limited" else update


def _moved(theta: NDArray, update: NDArray, words: _Words, fault: str) -> NDArray:
    lr, decay = words.lr, words.decay
    if fault == "decay_coupled":
        decay = 0.0
    if fault == "trust_ratio":
        length, reach = np.sqrt((theta**2).sum()), np.sqrt((update**2).sum())
        update = update * (length / reach if length and reach else 1.0)
    if fault == "rate_under_the_root":
        lr = lr**0.5
    if fault == "ascends":
        return theta * (1 - lr * decay) + lr * update
    if fault == "decay_of_the_updated":
        return (theta - lr * update) * (1 - lr * decay)
    if fault == "decay_in_the_ratio":
        return theta - lr * (update + decay * theta) * np.where(update == 0, 0.5, 1 / (1 + np.abs(update)))
    if fault == "decay_without_rate":
        return theta * (1 - decay) - lr * update
    if fault == "decay_as_a_step":
        return theta - lr * update - lr * decay * np.sign(theta)
    if fault == "decay_corrected":
        decay = decay / (1 - words.beta1**words.step)
    return theta * (1 - lr * decay) - lr * update


def _tail(theta: NDArray, moved: NDArray, fault: str) -> NDArray:
    """What moved, in which a last group of lanes that is not full may stay."""
    if fault != "tail_untouched" or theta.size % LANES == 0:
        return moved
    full = theta.size // LANES * LANES
    return np.concatenate([moved.reshape(-1)[:full], theta.reshape(-1)[full:]]).reshape(theta.shape)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "first-step-is-the-rate-against-the-gradient": {
        "eps_before_the_correction": (
            "nanochat#304",
            "eps is added to sqrt(v) before its correction: 31 times as large",
        ),
        "eps_inside_the_root": ("mutation: as in a norm", "sqrt(v + eps)"),
        "eps_missing": ("mutation: 0 for eps", "nothing is added to the root"),
        "root_missing": ("mutation: a root forgotten", "m / (v + eps)"),
        "corrections_exchanged": ("mutation: two betas in one line", "m is corrected by beta2 and v by beta1"),
        "ascends": ("mutation: a sign", "parameters move along the gradient"),
    },
    "constant-gradient-moves-by-the-rate-at-every-step": {
        "correction_multiplies": ("convnetjs PR#107", "m times 1 - beta1^t"),
        "corrections_missing": ("mutation: no corrections", "m and v are used as they are"),
        "correction_of_m_missing": ("mutation: one correction of two", "m is used as it is"),
        "correction_of_v_missing": ("mutation: one correction of two", "v is used as it is"),
        "steps_counted_from_zero": ("mutation: t from 0", "beta^(t-1), and beta at the first step"),
        "steps_counted_from_two": ("mutation: counted before and after", "beta^(t+1)"),
        "corrections_of_one_step_only": ("mutation: beta for beta^t", "1 - beta at every step"),
        "step_in_half": ("mutation: a step in float16", "the step stops at 2048"),
        "averages_used_before_the_step": ("mutation: two lines in another order", "the move is that of the last step"),
    },
    "no-step-is-longer-than-the-averages-admit": {
        "beta_of_m_forgotten": ("mutation: momentum as in SGD", "m = beta1 m + g"),
    },
    "gradients-that-grow-move-furthest": {
        "move_limited": ("mutation: |step| <= lr, which is false", "moves end at lr"),
    },
    "scaled-gradients-move-alike": {
        "gradient_limited": ("mutation: clipping built in", "gradients end at 10"),
    },
    "opposite-gradients-move-the-other-way": {
        "sign_of_the_gradient_lost": ("mutation: |g| for g", "m averages magnitudes"),
        "only_positive_gradients_average": ("mutation: relu", "gradients below 0 count as 0"),
    },
    "move-is-proportional-to-the-rate": {
        "rate_under_the_root": ("mutation: a root over too much", "sqrt(lr)"),
        "eps_scaled_by_the_rate": ("mutation: eps and lr in one factor", "lr eps is added to the root"),
        "rate_in_the_average": ("mutation: momentum of moves", "m averages lr g"),
    },
    "rate-zero-moves-nothing": {
        "decay_without_rate": ("tensorflow/addons#2282", "decay is not multiplied by lr"),
        "rate_at_least_a_thousandth": ("mutation: a floor", "no rate is below 1e-3"),
    },
    "entries-are-on-their-own": {
        "tail_untouched": ("mutation: a loop over whole vectors only", "a last group of less than 4 stays"),
        "first_rate_for_all": ("mutation: an index that stays", "the root of the first entry divides all"),
    },
    "other-entries-have-no-influence": {
        "one_variance_for_all": ("mutation: one rate a tensor", "v is averaged over all entries"),
        "trust_ratio": ("mutation: LAMB for AdamW", "the move is scaled by |param| / |update|"),
        "variance_of_the_row": ("mutation: Adafactor for AdamW", "v is averaged over each row"),
        "gradients_centred": ("mutation: centred gradients", "the mean of all gradients is subtracted"),
    },
    "late-steps-are-alike": {
        "step_in_two_bytes": ("mutation: int16", "step 65 537 counts as step 1"),
        "rate_falls_with_the_step": ("mutation: a schedule built in", "lr / (1 + t 1e-7)"),
    },
    "everything-given-has-influence": {
        "eps_ignored": ("mutation: an argument without effect", "eps is always 1e-8"),
        "step_ignored": ("mutation: an argument without effect", "every step is the second"),
        "state_ignored": ("mutation: state that is not loaded", "m and v start at 0 each time"),
        "variance_ignored": ("mutation: v is not updated", "v stays"),
    },
    "averages-are-what-they-are-called": {
        "betas_exchanged": ("mutation: beta1 for beta2", "m is averaged with beta2, v with beta1"),
        "betas_ignored": ("mutation: an argument without effect", "the betas are always 0.9 and 0.999"),
        "betas_in_bfloat16": (
            "tt-metal#55935",
            "1 - beta is made of a beta in bfloat16: 0.999 is 1, and v stands still",
        ),
        "variance_centred": ("mutation: AdaBelief for Adam", "v averages (g - m)²"),
        "largest_for_mean": ("mutation: AdaMax for Adam", "v = max(beta2 v, g²)"),
        "variance_never_falls": ("pytorch#78807, the other way round", "AMSGrad's maximum is kept as v"),
        "variance_in_half": ("mutation: v in float16", "v is kept in float16"),
        "nesterov_kept": ("mutation: NAdam for Adam", "m looks a step ahead"),
    },
    "averages-of-several-steps": {
        "corrected_average_kept": ("mutation: m is corrected in place", "the corrected m is what comes back"),
    },
    "without-gradients-there-is-only-decay": {
        "decay_ignored": ("nntrainer PR#3527", "AdamW is Adam"),
        "decay_in_the_ratio": ("tensorli#1", "decay is divided by what divides the gradient"),
        "decay_twice": ("mutation: in both places", "2 lr weight_decay"),
        "decay_grows": ("mutation: a sign", "param (1 + lr weight_decay)"),
    },
    "decay-is-apart-from-the-step": {
        "decay_coupled": ("keras#19051", "weight_decay param is added to the gradient"),
        "decay_of_the_updated": ("transformers#14539", "decay acts on the weight that was already updated"),
        "decay_corrected": ("mutation: decay before the correction", "decay is divided by 1 - beta1^t"),
    },
    "decay-is-proportional-to-the-parameter": {
        "decay_as_a_step": ("mutation: L1 for L2", "lr weight_decay sign(param)"),
    },
    "leaves-inputs-untouched": {
        "averages_in_place": ("torch.optim, which does so", "m is updated in place"),
    },
    "repeats-itself": {
        "state_kept_between_calls": ("mutation: state in the function", "m of the last call is added"),
    },
}
_DTYPES = {"betas_in_bfloat16": "bfloat16"}
FAULTS = {
    variant: Fault("adamw_step", f"adamw_step/{law}", source, summary, _DTYPES.get(variant, "float32"))
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"adamw_step": _make(variant)} for variant in ("correct", *FAULTS)}
CAPABILITIES = {"adamw_step": Capabilities(dtypes=("float32", "bfloat16"), intermediate="float32")}
