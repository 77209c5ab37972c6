"""Models as targets: what may be given, what is known of it, what is said where it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import run_python

from veriformer.calling import UsageError
from veriformer.case import Case, flattened
from veriformer.catalogue import all_laws
from veriformer.checking import in_process
from veriformer.expect import Broken, Refused
from veriformer.moves import Move, crop, full, reorder, said, step, steps
from veriformer.reference_models import ReferenceDecoder, sample_weights, stand_in
from veriformer.running import Item, Row
from veriformer.subject import Subject
from veriformer.targets import Options, load_functions

TOKENS = np.array([[0, 1, 2, 1], [2, 2, 0, 1]])


def weighted(params: Any, *, heads: int, positions: Any = "rotary", max_length: Any = None) -> Any:
    return ReferenceDecoder(params, heads=heads, positions=positions, max_length=max_length)


class Late(ReferenceDecoder):
    """Every step after the first stands one place too far on."""

    def step(self, tokens: Any, cache: Any, *, mask: Any = None, positions: Any = None) -> Any:
        if positions is None and cache is not None:
            start = cache[0][0].shape[2] + 1
            positions = np.tile(np.arange(tokens.shape[1]) + start, (len(tokens), 1))
        return super().step(tokens, cache, mask=mask, positions=positions)


def late(params: Any, *, heads: int) -> Any:
    return Late(params, heads=heads)


def subject_of(target: Any, operation: str = "decoder_lm", dtype: str = "float64") -> Subject:
    return Subject(in_process(load_functions({operation: target}, Options())), operation, dtype)


def with_weights(operation: str = "decoder_lm", **arrays: Any) -> Case:
    weights = flattened(sample_weights(operation), "params")
    return Case(operation, {"tokens": TOKENS, **arrays, **weights}, {"heads": 2}, "float64")


def judge(law: str, target: Any, dtype: str = "float64", operation: str = "decoder_lm") -> Row:
    found = next(one for one in all_laws() if one.id == f"{operation}/{law}")
    return Item(found, in_process(load_functions({operation: target}, Options())), dtype, "smoke").run()


def test_a_factory_of_weights_an_object_and_a_factory_of_one_are_targets() -> None:
    own = stand_in("decoder_lm", 3)
    for target, weights in ((weighted, True), (own, False), (lambda: own, False)):
        facts = subject_of(target).facts
        assert facts is not None and facts.weights == weights and not facts.trouble
        assert facts.words == ("full", "step", "crop", "reorder")
        assert facts.takes["step"] == {"mask": "mask", "positions": "positions"}


def test_what_an_object_says_of_itself_is_known() -> None:
    facts = subject_of(stand_in("decoder_lm", 5, window=3, max_length=7)).facts
    assert facts is not None
    assert (facts.vocabulary, facts.max_length, facts.dtypes) == (5, 7, ("float64",))
    assert "vocabulary 5; max_length 7; weights of its own" in facts.says()


def test_programs_cross_with_caches_as_numbers() -> None:
    lm = subject_of(weighted)
    moves = [full(TOKENS), *steps(TOKENS, [3]), crop(0, 1, 1), reorder(1, np.array([1, 0]), 2)]
    whole, first, last = lm.run(with_weights(), [*moves, step(TOKENS[::-1, 1:], 2, 3)])
    np.testing.assert_allclose(first, whole[:, :3], atol=1e-14)
    np.testing.assert_allclose(last, whole[::-1, 1:], atol=1e-14)
    assert said(moves[1:]) == "step([[0,1,2],[2,2,0]]), crop(1), reorder([1,0])"
    assert said(9 * moves).startswith("full(4), step(3), crop(1), reorder([1,0]), full(4)")


def test_a_model_of_its_own_weights_is_cast_and_seeded() -> None:
    torch = pytest.importorskip("torch")

    class Tiny(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(5, 5)

        def full(self, tokens: Any) -> Any:
            return self.embedding(tokens).cumsum(1)

        def step(self, tokens: Any, cache: Any) -> Any:
            logits = self.full(tokens) + (0 if cache is None else cache)
            return logits, logits[:, -1:]

    case = Case("decoder_lm", {"tokens": TOKENS}, {}, "float64")
    for target in (Tiny, Tiny()):
        model = subject_of(target, dtype="float64")
        assert model.facts is not None and model.facts.dtypes == ("float64", "float32", "bfloat16", "float16")
        for dtype in model.facts.dtypes:
            outcome = subject_of(target, dtype=dtype).outcome(Case("decoder_lm", case.arrays, {}, dtype))
            assert outcome.dtypes == (dtype,)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, second = (subject_of(Tiny)(case) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert torch.equal(before, torch.random.get_rng_state())
    assert judge("cache-changes-nothing", Tiny).verdict == "pass"


def test_a_wrong_position_is_found_and_made_small() -> None:
    row = judge("cache-changes-nothing", late)
    assert row.verdict == "fail" and row.failure is not None
    assert row.failure.case.numbers <= 32
    assert said(row.failure.calls[0].program) == "full([1,0]), step([1]), step([0])"
    assert judge("cache-changes-nothing", weighted).verdict == "pass"
    assert judge("prefix-decides", late).verdict == "pass"


def test_the_reference_stands_in_where_weights_are_unknown() -> None:
    row = judge("any-walk-equals-full", lambda: stand_in("decoder_lm", 4))
    assert (row.verdict, row.judged > 0) == ("pass", True)


def test_what_a_method_returns_is_looked_at() -> None:
    class Bare(ReferenceDecoder):
        def step(self, tokens: Any, cache: Any, *, mask: Any = None, positions: Any = None) -> Any:
            return super().step(tokens, cache)[0]

    class Last(ReferenceDecoder):
        def full(self, tokens: Any) -> Any:
            return super().full(tokens)[:, -1]

    bare, last = (subject_of(lambda params, *, heads, kind=kind: kind(params, heads=heads)) for kind in (Bare, Last))
    with pytest.raises(Broken, match="step returned ndarray, wanted a pair: logits and the cache"):
        bare.run(with_weights(), steps(TOKENS, [4]))
    with pytest.raises(Broken, match=r"full gave shape \(2, 3\), wanted \(2, 4, 3\)"):
        last.run(with_weights(), [full(TOKENS)])
    with pytest.raises(Refused, match="crop"):
        subject_of(weighted).run(with_weights(), [*steps(TOKENS, [2]), crop(0, 3, 1)])
    with pytest.raises(Broken, match="has no forget"):
        subject_of(weighted).run(with_weights(), [Move("forget")])


def test_trouble_in_making_a_model_is_a_failure_of_the_first_law() -> None:
    def broken() -> Any:
        raise OSError("no weights here")

    facts = subject_of(broken).facts
    assert facts is not None and facts.trouble == "OSError: no weights here"
    assert judge("returns-an-array", broken).verdict == "error"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (3, "decoder_lm is a int; wanted an object with full, step, a factory"),
        (lambda weights: None, "the factory needs 'weights'"),
        (lambda params: None, "no parameter for 'heads'"),
        (lambda params, *, heads, colour: None, "parameter 'colour' has no default"),
    ],
)
def test_what_cannot_be_a_model_is_one_line(target: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_functions({"decoder_lm": target}, Options())


SCRIPT = """
import numpy as np
import veriformer
from veriformer.reference_models import stand_in
report = veriformer.check(decoder_lm=stand_in("decoder_lm", 4), effort="smoke", laws=["decoder_lm/prefix-decides"])
print([row.verdict for row in report.rows])
"""


def test_a_model_in_memory_can_be_checked(tmp_path: Path) -> None:
    assert run_python("-c", SCRIPT, folder=tmp_path).stdout.strip() == "['pass']"


class Forbidding(ReferenceDecoder):
    """The first token never comes: its logit is a mark."""

    def full(self, tokens: Any) -> Any:
        return self._marked(super().full(tokens))

    def step(self, tokens: Any, cache: Any, *, mask: Any = None, positions: Any = None) -> Any:
        logits, cache = super().step(tokens, cache, mask=mask, positions=positions)
        return self._marked(logits), cache

    @staticmethod
    def _marked(logits: Any) -> Any:
        return np.where(np.arange(logits.shape[-1]) == 0, -1e9, logits)


class ForbiddingLate(Forbidding, Late):
    """The same, and every step after the first stands one place too far on."""


class Lengthening(ReferenceDecoder):
    """Logits grow with the number of tokens, by little."""

    def full(self, tokens: Any) -> Any:
        return super().full(tokens) * (1 + 1e-4 * tokens.shape[1])


def own_of(kind: Any) -> Any:
    return kind(stand_in("decoder_lm", 5).params, heads=2)


def test_a_mark_for_a_token_that_must_not_come_hides_no_mistake() -> None:
    assert judge("cache-changes-nothing", own_of(Forbidding)).verdict == "pass"
    assert judge("cache-changes-nothing", own_of(ForbiddingLate)).verdict == "fail"


def test_no_law_takes_what_it_judges_for_noise() -> None:
    assert judge("prefix-decides", own_of(Lengthening)).verdict == "fail"


def test_modules_deep_inside_are_put_in_eval_mode() -> None:
    torch = pytest.importorskip("torch")

    class Holder:
        def __init__(self) -> None:
            self.parts = {"lm": [torch.nn.Sequential(torch.nn.Embedding(5, 5), torch.nn.Dropout(0.5))]}

        def full(self, tokens: Any) -> Any:
            return self.parts["lm"][0](tokens)

        def step(self, tokens: Any, cache: Any) -> Any:
            return self.full(tokens), 0

    loaded = load_functions({"decoder_lm": Holder}, Options(framework="torch"))
    model, case = Subject(in_process(loaded), "decoder_lm", "float32"), Case("decoder_lm", {"tokens": TOKENS})
    np.testing.assert_array_equal(model(case), model(case))
    assert (model(case) != 0).all()


def test_a_model_that_works_in_one_dtype_alone_is_judged_in_it() -> None:
    torch = pytest.importorskip("torch")

    class Single(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(5, 5)

        def full(self, tokens: Any) -> Any:
            if self.table.weight.dtype != torch.float32:
                raise RuntimeError("float32 only")
            return self.table(tokens).cumsum(1)

        def step(self, tokens: Any, cache: Any) -> Any:
            logits = self.full(tokens) + (0 if cache is None else cache)
            return logits, logits[:, -1:]

    facts = subject_of(Single).facts
    assert facts is not None and facts.vocabulary == 5 and facts.dtypes[0] == "float32"


def test_nothing_is_no_cache() -> None:
    class Forgetful(ReferenceDecoder):
        def crop(self, cache: Any, length: int) -> Any:
            super().crop(cache, length)

    row = judge("crop-rolls-back", lambda params, *, heads: Forgetful(params, heads=heads))
    assert row.failure is not None and "crop returned None for the cache" in row.failure.message


def test_a_model_without_a_method_is_one_line() -> None:
    class Half:
        def full(self, tokens: Any) -> Any:
            return tokens

    for target in (Half(), Half):
        with pytest.raises(UsageError, match=r"has full but lacks step; wanted step\(tokens, cache\)"):
            load_functions({"decoder_lm": target}, Options())
    with pytest.raises(UsageError, match="--accepts, --returns"):
        load_functions({"decoder_lm": own_of(ReferenceDecoder)}, Options(accepts=("mask",)))
