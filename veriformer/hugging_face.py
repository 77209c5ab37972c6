"""Models of Hugging Face transformers as targets: with the methods of decoder_lm or encoder_decoder.

Nothing here imports transformers: a model is known by the classes it is made of. The two classes at the end go into
scripts as they stand, hence they need nothing of ours.
"""

from __future__ import annotations

import inspect
from typing import Any

from veriformer.calling import UsageError


def is_hugging_face(target: Any) -> bool:
    """Whether a target is a model of transformers, and not a class of such."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(target).__mro__
    )


def adapted(target: Any, operation: str) -> Any:
    """A model of transformers with the methods of an operation; any other target as it is.

    Raises UsageError for a model of another kind, saying which is wanted.
    """
    if not is_hugging_face(target):
        return target
    check_hugging_face(target, operation)
    return HuggingFaceDecoder(target) if operation == "decoder_lm" else HuggingFaceEncoderDecoder(target)


def check_hugging_face(model: Any, operation: str) -> None:
    """Raise UsageError for a model of transformers that is not of the kind of an operation."""
    name, pair = type(model).__name__, bool(getattr(model.config, "is_encoder_decoder", False))
    takes = inspect.signature(model.forward).parameters
    if not model.can_generate():
        wanted = "a …ForCausalLM model" if operation == "decoder_lm" else "a …ForConditionalGeneration model"
        raise UsageError(f"{operation} is a {name}, which does not generate; wanted {wanted}, with its head")
    if pair != (operation == "encoder_decoder"):
        other = "encoder_decoder" if pair else "decoder_lm"
        raise UsageError(f"{operation} is a {name}; give it as {other}=")
    if "input_ids" not in takes or not any(word in takes for word in HuggingFaceDecoder.CACHES):
        lacks = "tokens (input_ids)" if "input_ids" not in takes else "a cache (past_key_values)"
        raise UsageError(f"{operation} is a {name}, whose forward takes no {lacks}: it cannot be judged as a model")


def wrapper_of(model: Any) -> str:
    """The name of our class around a model of transformers, "" for any other."""
    return type(model).__name__ if isinstance(model, HuggingFaceDecoder) else ""


def wrapper_lines(name: str) -> list[str]:
    """The source of such a class, for a script."""
    kinds: list[type] = [HuggingFaceDecoder]
    kinds += [HuggingFaceEncoderDecoder] if name == HuggingFaceEncoderDecoder.__name__ else []
    sources = [["", "", *inspect.getsource(kind).splitlines()] for kind in kinds]
    return ["", "import inspect", "from typing import Any", *(line for lines in sources for line in lines), "", ""]


class HuggingFaceDecoder:
    """A causal language model of transformers as decoder_lm: full, step, and crop and reorder where its cache has them.

    The cache is the one that the model makes itself. vocabulary, max_length and window come from its config;
    max_position_embeddings counts as max_length only where positions are rows of a table. crop is left out where layers
    keep but a window: such a cache can take back only what it was told to keep.
    """

    CACHES = ("cache", "past_key_values", "cache_params")

    def __init__(self, model: Any) -> None:
        self.model = model
        self.takes = tuple(inspect.signature(model.forward).parameters)
        self.kept = next(word for word in self.CACHES if word in self.takes)
        config = model.config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        self.vocabulary = config.vocab_size
        self.window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
        parts = model.named_modules()
        tables = [name for name, part in parts if hasattr(part, "num_embeddings") and ("pos" in name or "wpe" in name)]
        self.max_length = getattr(config, "max_position_embeddings", None) if tables else None

    def full(self, tokens: Any) -> Any:
        """logits[B,T,V] of tokens[B,T]."""
        return self.model(input_ids=tokens, use_cache=False).logits

    @property
    def step(self) -> Any:
        """step(tokens[B,m], cache, mask[B, tokens so far + m], positions[B,m]) -> logits[B,m,V], cache."""
        return self._step if "position_ids" in self.takes else self._step_without_positions

    def _step(self, tokens: Any, cache: Any, mask: Any = None, positions: Any = None) -> tuple[Any, Any]:
        return self._taken({"input_ids": tokens, "attention_mask": mask, "position_ids": positions}, cache)

    def _step_without_positions(self, tokens: Any, cache: Any, mask: Any = None) -> tuple[Any, Any]:
        return self._taken({"input_ids": tokens, "attention_mask": mask}, cache)

    def _taken(self, arrays: dict[str, Any], cache: Any) -> tuple[Any, Any]:
        given = {name: array for name, array in {**arrays, self.kept: cache}.items() if array is not None}
        if "attention_mask" in given:
            given["attention_mask"] = given["attention_mask"].long()
        found = self.model(**given, use_cache=True)
        return found.logits, getattr(found, self.kept)

    @property
    def crop(self) -> Any:
        """crop(cache, length) -> cache, or None where the cache cannot."""
        cache = self._first_cache()
        kept_whole = getattr(cache, "is_croppable", True) and not any(getattr(cache, "is_sliding", ()))
        return self._crop if callable(getattr(cache, "crop", None)) and kept_whole else None

    @property
    def reorder(self) -> Any:
        """reorder(cache, rows[B]) -> cache, or None where the cache cannot."""
        return self._reorder if callable(getattr(self._first_cache(), "reorder_cache", None)) else None

    def _first_cache(self) -> Any:
        """The cache after a token, to see what it can do."""
        token = next(self.model.parameters()).new_zeros((1, 1)).long()
        return self.step(token, None)[1]

    def _crop(self, cache: Any, length: int) -> Any:
        beyond = int(cache.get_seq_length()) - length
        if beyond > 0:
            cache.crop(-beyond)  # a negative number takes so many tokens away, in every version
        return cache

    def _reorder(self, cache: Any, rows: Any) -> Any:
        cache.reorder_cache(rows)
        return cache


class HuggingFaceEncoderDecoder(HuggingFaceDecoder):
    """A sequence-to-sequence model of transformers as encoder_decoder: encode, full, step, perhaps crop and reorder.

    A memory is what the encoder gives, with its mask.
    """

    def encode(self, source: Any, mask: Any = None) -> Any:
        """What steps see of source[B,S]; mask[B,S], True = real token."""
        mask = None if mask is None else mask.long()
        return self.model.get_encoder()(input_ids=source, attention_mask=mask), mask

    def full(self, source: Any, target: Any, mask: Any = None) -> Any:  # type: ignore[override]
        """logits[B,T,V] of source[B,S] and target[B,T]."""
        mask = None if mask is None else mask.long()
        return self.model(input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits

    @property
    def step(self) -> Any:
        """step(tokens[B,m], memory, cache) -> logits[B,m,V], cache."""
        return self._step_with_memory

    def _step_with_memory(self, tokens: Any, memory: Any, cache: Any) -> tuple[Any, Any]:
        encoded, mask = memory
        return self._taken({"encoder_outputs": encoded, "attention_mask": mask, "decoder_input_ids": tokens}, cache)

    def _first_cache(self) -> Any:
        """The cache after a token, to see what it can do."""
        token = next(self.model.parameters()).new_zeros((1, 1)).long()
        return self.step(token, self.encode(token), None)[1]
