"""No accusation without the reference: a law that it breaks too is the suite's fault, and no case shrinks there."""

from __future__ import annotations

import numpy as np
import pytest
from toys import ROOT, implementation, judged, row_case, softmax, toy_law

from veriformer.catalogue import all_laws
from veriformer.checking import in_process
from veriformer.declarations import Capabilities
from veriformer.dialect import reference_call
from veriformer.expect import Refused, expect_same
from veriformer.guard import reference_keeps
from veriformer.law import Law, find_laws
from veriformer.running import Item
from veriformer.targets import Options, load, load_functions


def law_called(name: str) -> Law:
    return find_laws(all_laws(), [name])[0]


def test_a_law_that_the_reference_breaks_too_is_the_suites_fault() -> None:
    wrong = toy_law(lambda softmax, case: expect_same(softmax(case), case["x"]), kind="metamorphic")
    row = judged(wrong, softmax=softmax)
    assert row.verdict == "suite_error" and row.reason == "the reference breaks this law too: shape=[2]; x=[0,1]"


def test_the_reference_keeps_a_law_that_holds() -> None:
    law, one = law_called("softmax/sums-to-one"), implementation(softmax=softmax)
    assert reference_keeps(law, one, "float32", (row_case(0, 1, 2),))


@pytest.mark.parametrize("operation", ["softmax", "layer_norm", "attention", "attention_with_lse"])
def test_the_reference_keeps_every_forward_law_on_its_pinned_cases(operation: str) -> None:
    (loaded,) = load("veriformer.impls.numpy_plain", Options())
    one, broken = in_process(loaded), []
    for law in all_laws():
        domain = one.domain(operation, "float32")
        if law.operation != operation or law.kind == "gradient" or law.missing(domain):
            continue
        kept = [reference_keeps(law, one, "float32", arguments) for arguments in law.pinned(domain)]
        if not all(kept):
            broken.append(law.id)
    assert not broken


def test_a_causal_failure_stays_causal_while_it_shrinks() -> None:
    (loaded,) = load(f"{ROOT}/impls/faulty/attention.py:causal_plus_one", Options())
    row = Item(law_called("attention/future-has-no-influence"), in_process(loaded), "float32", "smoke").run()
    assert row.failure is not None and all(call.case["causal"] for call in row.failure.calls)


def test_the_reference_speaks_the_declared_dialect() -> None:
    law = law_called("attention/equals-the-reference")
    one = implementation(attention=lambda q, k, v, causal=False: q)
    (case,) = [c for (c,) in law.pinned(one.domain("attention", "float32")) if c["causal"]][:1]
    assert reference_keeps(law, one, "float32", (case,))


def test_a_refusal_is_no_proof() -> None:
    def refuse(softmax: object, case: object) -> None:
        raise Refused("no")

    assert not reference_keeps(toy_law(refuse), implementation(softmax=softmax), "float32", (row_case(0, 1),))


def test_gradients_of_the_reference_come_from_torch() -> None:
    torch = pytest.importorskip("torch")
    law = law_called("softmax/gradient-exists")
    one = in_process(load_functions({"softmax": lambda x: torch.softmax(x, -1)}, Options(framework="torch")))
    assert reference_keeps(law, one, "float32", (row_case(0.0, 1.0),))
    wrong = toy_law(lambda softmax, case: expect_same(softmax.gradients(case, ("x",))["x"], np.ones(2)))
    assert not reference_keeps(wrong, one, "float32", (row_case(0.0, 1.0),))


def test_the_dialect_of_layer_norm_reaches_the_reference() -> None:
    arrays = {"x": np.array([[1.0, 3.0]]), "weight": np.ones(2), "bias": np.zeros(2)}
    inside, outside = (
        reference_call("layer_norm", Capabilities(norm_epsilon=where), arrays, {"eps": 1.0})
        for where in ("inside", "outside")
    )
    assert inside[0, 1] == pytest.approx(0.5**0.5) and outside[0, 1] == pytest.approx(0.5)
