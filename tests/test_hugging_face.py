"""Models of transformers as targets: as they stand, by factories, of the wrong kind, and with planted faults."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import run_python

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from veriformer.calling import UsageError  # noqa: E402
from veriformer.case import Case, literal_case  # noqa: E402
from veriformer.catalogue import all_laws  # noqa: E402
from veriformer.checking import in_process  # noqa: E402
from veriformer.moves import full, steps  # noqa: E402
from veriformer.running import Item, Row  # noqa: E402
from veriformer.subject import Subject  # noqa: E402
from veriformer.targets import Options, load_functions  # noqa: E402

SIZES = {
    "vocab_size": 7,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = np.array([[0, 1, 2, 6], [3, 3, 0, 1]])


def sharp(model: Any) -> Any:
    """A model whose attention is far from the average."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.dim() > 1 else 1.0)
    return model


def llama(kind: Any = None) -> Any:
    kind = kind or transformers.LlamaForCausalLM
    torch.manual_seed(0)
    return sharp(kind(transformers.LlamaConfig(**SIZES)))


def mistral() -> Any:
    return sharp(
        transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=3))
    )


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=7, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    )


def t5() -> Any:
    sizes = {"vocab_size": 7, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    return sharp(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))


def judge(law: str, target: Any, operation: str = "decoder_lm", dtype: str = "float32") -> Row:
    found = next(one for one in all_laws() if one.id == f"{operation}/{law}")
    return Item(found, in_process(load_functions({operation: target}, Options())), dtype, "look").run()


def facts_of(target: Any, operation: str = "decoder_lm") -> Any:
    return Subject(in_process(load_functions({operation: target}, Options())), operation, "float32").facts


@pytest.mark.parametrize(
    "law", ["cache-changes-nothing", "left-padding-changes-nothing", "crop-rolls-back", "reorder-moves-rows"]
)
def test_a_model_as_it_stands_keeps_the_laws(law: str) -> None:
    assert judge(law, llama()).verdict == "pass"


def test_its_config_says_what_it_is() -> None:
    one, windowed, table = facts_of(llama()), facts_of(mistral), facts_of(gpt2)
    assert one.words == ("full", "step", "crop", "reorder") and one.takes["step"].keys() == {"mask", "positions"}
    assert (one.vocabulary, one.max_length, one.window, one.factory) == (7, None, None, False)
    assert (windowed.window, windowed.words, windowed.factory) == (3, ("full", "step", "reorder"), True)
    assert table.max_length == 16  # the only one whose positions end


def test_the_given_object_stays_as_it_is() -> None:
    model = llama().train()
    assert judge("cache-changes-nothing", model, dtype="bfloat16").verdict == "pass"
    assert model.training and model.lm_head.weight.dtype == torch.float32


class Misplaced(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """Positions begin anew in every step."""

    def forward(self, input_ids: Any, position_ids: Any = None, **more: Any) -> Any:
        count = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        return super().forward(input_ids, position_ids=count, **more)

    forward.__signature__ = inspect.signature(transformers.LlamaForCausalLM.forward)  # type: ignore[attr-defined]


class Unmasked(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """The mask is dropped once there is a cache."""

    def forward(self, input_ids: Any, attention_mask: Any = None, **more: Any) -> Any:
        first = more.get("cache", more.get("past_key_values")) is None
        return super().forward(input_ids, attention_mask=attention_mask if first else None, **more)

    forward.__signature__ = inspect.signature(transformers.LlamaForCausalLM.forward)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "law"), [(Misplaced, "cache-changes-nothing"), (Unmasked, "left-padding-changes-nothing")]
)
def test_a_planted_fault_is_found(kind: Any, law: str) -> None:
    assert judge(law, llama(kind)).verdict == "fail"
    assert judge("prefix-decides", llama(kind)).verdict == "pass"


@pytest.mark.parametrize(
    "law", ["cache-changes-nothing", "source-padding-changes-nothing", "crop-rolls-back", "reorder-moves-rows"]
)
def test_a_sequence_to_sequence_model_keeps_the_laws(law: str) -> None:
    assert judge(law, t5, "encoder_decoder").verdict == "pass"


def test_a_factory_is_told_the_dtype() -> None:
    def made(dtype: Any) -> Any:
        return llama().to(dtype)

    facts = facts_of(made)
    assert facts.takes_dtype and facts.dtypes[0] == "float64"
    model = Subject(in_process(load_functions({"decoder_lm": made}, Options())), "decoder_lm", "float64")
    whole, first, second = model.run(
        Case("decoder_lm", {"tokens": TOKENS}, {}, "float64"), [full(TOKENS), *steps(TOKENS, [3, 1])]
    )
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, atol=1e-5)


def test_a_model_of_another_kind_is_one_line() -> None:
    bert = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    masked = transformers.BertForMaskedLM(transformers.BertConfig(**bert))
    headless = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    for target, operation, said in (
        (masked, "decoder_lm", "is a BertForMaskedLM, which does not generate; wanted a …ForCausalLM model"),
        (headless, "decoder_lm", "is a LlamaModel, which does not generate"),
        (headless, "encoder_decoder", "wanted a …ForConditionalGeneration model"),
        (t5(), "decoder_lm", "is a T5ForConditionalGeneration; give it as encoder_decoder="),
        (llama(), "encoder_decoder", "is a LlamaForCausalLM; give it as decoder_lm="),
        (lambda: masked, "decoder_lm", "is a BertForMaskedLM"),
    ):
        with pytest.raises(UsageError, match=said):
            load_functions({operation: target}, Options())


FILE = """
from transformers import LlamaConfig, LlamaForCausalLM
CONFIG = LlamaConfig(vocab_size=7, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)

class Cut(LlamaForCausalLM):
    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, past_key_values=None, **more):
        out = super().forward(input_ids, cache=cache, **more)
        out.logits = out.logits + (0.5 if cache is not None else 0)
        return out

model = Cut(CONFIG)

def make():
    return LlamaForCausalLM(CONFIG)
"""


def test_a_file_a_factory_without_torch_and_the_script_of_a_failure(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    words = ("--law", "decoder_lm/cache-changes-nothing", "--dtype", "float32", "--effort", "look")
    good = run_python("-m", "veriformer", "check", "decoder_lm=mine.py:make", *words, folder=tmp_path)
    assert good.returncode == 0, good.stdout + good.stderr
    bad = run_python("-m", "veriformer", "check", "decoder_lm=mine.py:model", *words, folder=tmp_path)
    assert bad.returncode == 1, bad.stdout + bad.stderr
    (script,) = (tmp_path / ".veriformer").glob("cache-changes-nothing-*.py")
    assert "veriformer" not in script.read_text().split('"""', 2)[2].replace(str(tmp_path), "")
    script.write_text(script.read_text().replace("signal.alarm(30)", "signal.alarm(100)"))  # importing takes its time
    again = run_python(str(script), folder=tmp_path)
    assert again.returncode == 1 and "Traceback" not in again.stderr, again.stdout + again.stderr


def test_a_known_failure_of_a_model_with_weights_of_its_own_needs_tokens_alone() -> None:
    case = literal_case("decoder_lm", {"tokens": [[0, 1]]}, "float32")
    assert case.arrays["tokens"].tolist() == [[0, 1]]
    with pytest.raises(ValueError, match="'heads' is missing"):
        literal_case("decoder_lm", {"tokens": [[0, 1]], "params.embedding": [[1.0]]}, "float32")
