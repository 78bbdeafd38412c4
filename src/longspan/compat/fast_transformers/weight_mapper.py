"""Weights of other implementations under the names of this one: rules that rename, split or drop keys."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._utils import atomic_io


class MappingRule:
    """``matches(key)`` says whether a rule is for a key, ``apply(key, value)`` returns what becomes of it."""

    def matches(self, key: str) -> bool:
        """Whether the rule is for this key."""
        raise NotImplementedError(f"{type(self).__name__} must define matches(key)")

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        """The entries that take its place."""
        raise NotImplementedError(f"{type(self).__name__} must define apply(key, value)")


class IdentityRule(MappingRule):
    """Keeps every key."""

    def matches(self, key: str) -> bool:
        return True

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        return [(key, value)]


class NotRule(MappingRule):
    """Keeps every key that ``rule`` does not match."""

    def __init__(self, rule: MappingRule):
        self.rule = rule

    def matches(self, key: str) -> bool:
        return not self.rule.matches(key)

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        return [(key, value)]


class OrRule(MappingRule):
    """Matches where one of ``rules`` does, and applies those that do, one to the results of the other."""

    def __init__(self, *rules: MappingRule):
        self.rules = rules

    def matches(self, key: str) -> bool:
        return any(rule.matches(key) for rule in self.rules)

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        entries = [(key, value)]
        for rule in self.rules:
            entries = [new for k, v in entries for new in (rule.apply(k, v) if rule.matches(k) else [(k, v)])]
        return entries


class RegexRule(MappingRule):
    """Replaces each match of a regular expression; ``replace`` as in ``re.sub``."""

    def __init__(self, search: str, replace: str | Callable[[re.Match], str]):
        self.pattern, self.replace = re.compile(search), replace

    def matches(self, key: str) -> bool:
        return self.pattern.search(key) is not None

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        return [(self.pattern.sub(self.replace, key), value)]


class PytorchAttentionWeightsRule(MappingRule):
    """Cuts the weights and biases that ``nn.MultiheadAttention`` keeps for queries, keys and values together."""

    def matches(self, key: str) -> bool:
        return "self_attn.in_proj_" in key

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        before, _, kind = key.partition("self_attn.in_proj_")
        parts = zip(("query", "key", "value"), value.chunk(3), strict=True)
        return [(f"{before}attention.{name}_projection.{kind}", part) for name, part in parts]


class SimpleMapper:
    """The first rule that matches a key decides; a key that none matches is dropped.

    ``add_identity`` appends a rule that keeps what is left.
    """

    def __init__(self, rules: Sequence[MappingRule] = (), add_identity: bool = True):
        self._rules = [*rules, IdentityRule()] if add_identity else list(rules)

    def map(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state dict under its new names; the given one is left as it is."""
        new: dict[str, Tensor] = {}
        for key, value in state_dict.items():
            for rule in self._rules:
                if rule.matches(key):
                    new.update(rule.apply(key, value))
                    break
        return new

    @classmethod
    def load_file(
        cls, filepath: Any, model_root: str | None = None, map_location: Any = None, **other_args: Any
    ) -> Any:
        """``torch.load`` and ``map``. ``model_root``: the key under which a checkpoint has the state dict.

        Nothing but plain values and tensors is unpickled, unless ``weights_only=False`` asks for it, which runs
        whatever code a file brings. Raises OSError for a path that is not a regular file.
        """
        if isinstance(filepath, str | os.PathLike):
            atomic_io.open_regular(filepath).close()
        state = torch.load(filepath, map_location=map_location, **{"weights_only": True, **other_args})
        if model_root is None:
            return cls().map(state)
        return {**state, model_root: cls().map(state[model_root])}


class PytorchMapper(SimpleMapper):
    """From ``nn.TransformerEncoder(nn.TransformerEncoderLayer(...))``, normalised after each part."""

    def __init__(self):
        rename = RegexRule(
            r"layers\.(\d+)\.self_attn\.([a-z]+)_proj(?:ection)?\.", r"layers.\1.attention.\2_projection."
        )
        rest = NotRule(RegexRule(r"\.softmax_temp$", ""))
        super().__init__([PytorchAttentionWeightsRule(), rename, rest], add_identity=False)


# The dot behind a name keeps Longformer's ``query_global`` apart.
_BERT = (
    (r"layer\.(\d+)\.attention\.self\.(query|key|value)\.", r"layers.\1.attention.\2_projection."),
    (r"layer\.(\d+)\.attention\.output\.dense\.", r"layers.\1.attention.out_projection."),
    (r"layer\.(\d+)\.attention\.output\.LayerNorm\.", r"layers.\1.norm1."),
    (r"layer\.(\d+)\.intermediate\.dense\.", r"layers.\1.linear1."),
    (r"layer\.(\d+)\.output\.dense\.", r"layers.\1.linear2."),
    (r"layer\.(\d+)\.output\.LayerNorm\.", r"layers.\1.norm2."),
)


class HugginfaceBertEncoderMapper(SimpleMapper):
    """From the encoder of a BERT of the transformers library. (The name is spelt as in the original.)"""

    def __init__(self):
        super().__init__([RegexRule(*rule) for rule in _BERT])


class LongformerMapper(SimpleMapper):
    """From the encoder of a Longformer, whose projections for global attention are left out."""

    def __init__(self):
        rules = [RegexRule(*rule) for rule in _BERT]
        drop = NotRule(RegexRule(r"layer\.(\d+)\.attention\.self\.(query|key|value)_global", ""))
        super().__init__([*rules, drop], add_identity=False)
