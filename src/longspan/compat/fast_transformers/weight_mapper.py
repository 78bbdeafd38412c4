"""Rename the weights of other implementations: rules that rename, split or drop keys."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._utils import atomic_io


class MappingRule:
    """Base class of rules: ``matches(key)`` selects keys, ``apply(key, value)`` returns their new entries."""

    def matches(self, key: str) -> bool:
        """Return whether the rule applies to this key."""
        raise NotImplementedError(f"{type(self).__name__} must define matches(key)")

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        """Return the entries that replace this one."""
        raise NotImplementedError(f"{type(self).__name__} must define apply(key, value)")


class IdentityRule(MappingRule):
    """Keep every key."""

    def matches(self, key: str) -> bool:
        return True

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        return [(key, value)]


class NotRule(MappingRule):
    """Keep every key that ``rule`` does not match."""

    def __init__(self, rule: MappingRule):
        self.rule = rule

    def matches(self, key: str) -> bool:
        return not self.rule.matches(key)

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        return [(key, value)]


class OrRule(MappingRule):
    """Match if one of ``rules`` does, and apply the rules that match, in turn."""

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
    """Replace each match of a regular expression; ``replace`` as in ``re.sub``."""

    def __init__(self, search: str, replace: str | Callable[[re.Match], str]):
        self.pattern, self.replace = re.compile(search), replace

    def matches(self, key: str) -> bool:
        return self.pattern.search(key) is not None

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        return [(self.pattern.sub(self.replace, key), value)]


class PytorchAttentionWeightsRule(MappingRule):
    """Split the joint weights and biases of ``nn.MultiheadAttention`` into queries, keys and values."""

    def matches(self, key: str) -> bool:
        return "self_attn.in_proj_" in key

    def apply(self, key: str, value: Tensor) -> list[tuple[str, Tensor]]:
        before, _, kind = key.partition("self_attn.in_proj_")
        parts = zip(("query", "key", "value"), value.chunk(3), strict=True)
        return [(f"{before}attention.{name}_projection.{kind}", part) for name, part in parts]


class SimpleMapper:
    """Apply the first rule that matches each key, and drop keys that no rule matches.

    Args:
        rules: the rules, in order.
        add_identity: append a rule that keeps the other keys.
    """

    def __init__(self, rules: Sequence[MappingRule] = (), add_identity: bool = True):
        self._rules = [*rules, IdentityRule()] if add_identity else list(rules)

    def map(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict with the new names; the given one does not change."""
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
        """Load a checkpoint by ``torch.load`` and map its state dict.

        Args:
            filepath: a path or file object.
            model_root: key of the state dict in the checkpoint; None means that the checkpoint is the state dict.
            map_location: as in ``torch.load``.
            other_args: other arguments of ``torch.load``. ``weights_only`` defaults to True; False unpickles any
                object, which can run code from the file.

        Returns:
            The mapped state dict, or the checkpoint with it at ``model_root``.

        Raises:
            OSError: the path is not a regular file.
        """
        if isinstance(filepath, str | os.PathLike):
            atomic_io.open_regular(filepath).close()
        state = torch.load(filepath, map_location=map_location, **{"weights_only": True, **other_args})
        if model_root is None:
            return cls().map(state)
        return {**state, model_root: cls().map(state[model_root])}


class PytorchMapper(SimpleMapper):
    """Map ``nn.TransformerEncoder(nn.TransformerEncoderLayer(...))``, normalized after each part."""

    def __init__(self):
        rename = RegexRule(
            r"layers\.(\d+)\.self_attn\.([a-z]+)_proj(?:ection)?\.", r"layers.\1.attention.\2_projection."
        )
        rest = NotRule(RegexRule(r"\.softmax_temp$", ""))
        super().__init__([PytorchAttentionWeightsRule(), rename, rest], add_identity=False)


# The dot after a name excludes Longformer's ``query_global``.
_BERT = (
    (r"layer\.(\d+)\.attention\.self\.(query|key|value)\.", r"layers.\1.attention.\2_projection."),
    (r"layer\.(\d+)\.attention\.output\.dense\.", r"layers.\1.attention.out_projection."),
    (r"layer\.(\d+)\.attention\.output\.LayerNorm\.", r"layers.\1.norm1."),
    (r"layer\.(\d+)\.intermediate\.dense\.", r"layers.\1.linear1."),
    (r"layer\.(\d+)\.output\.dense\.", r"layers.\1.linear2."),
    (r"layer\.(\d+)\.output\.LayerNorm\.", r"layers.\1.norm2."),
)


class HugginfaceBertEncoderMapper(SimpleMapper):
    """Map the encoder of a BERT of the transformers library. The name is spelled as in the original."""

    def __init__(self):
        super().__init__([RegexRule(*rule) for rule in _BERT])


class LongformerMapper(SimpleMapper):
    """Map the encoder of a Longformer, without its projections for global attention."""

    def __init__(self):
        rules = [RegexRule(*rule) for rule in _BERT]
        drop = NotRule(RegexRule(r"layer\.(\d+)\.attention\.self\.(query|key|value)_global", ""))
        super().__init__([*rules, drop], add_identity=False)
