"""Write the tables of recurrent models into docs/how-to.

    python -m longspan_lab.tools models_page

It needs transformers, in the newest version that longspan supports. The model types of transformers are those that
``accelerate()`` serves. A small model of each type of flash-linear-attention runs once, which records its operations.
"""

import importlib
import re
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from longspan import ops
from longspan.compat.fla import models
from longspan.compat.fla.models.unserved import UNSERVED
from longspan.compat.transformers import accelerate, restore
from longspan.compat.transformers.models import MODELS, WRAPPERS
from longspan.compat.transformers.record import replaced

from . import DOCS

HEAD = ("checkpoint format", "model types", "layer", "what runs on longspan's kernels")
# Options of a small model of any type; each type takes those of the second group that it has.
COMMON = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 11}
SMALL = {"num_heads": 2, "head_dim": 16, "state_size": 8, "n_groups": 1}
SPECIAL = {"hgrn2": {"expand_ratio": 16}, "nsa": {"num_kv_heads": 1}}
CONVOLUTION = "the causal convolution"


def parts() -> dict[str, list[str]]:
    """What of each model type of transformers runs on kernels."""
    found: dict[str, dict[str, None]] = {}
    restore()
    try:
        accelerate()
        for one in replaced:
            # Fixes of other code are parts without counts.
            if one.counts and one.part:
                found.setdefault(one.model, {})[one.part] = None
    finally:
        restore()
    return {model: list(names) for model, names in found.items()}


def of_transformers(served: dict[str, list[str]]) -> Iterator[tuple[str, ...]]:
    """The rows of transformers: types with the same layer and the same parts share one."""
    rows: dict[tuple[str, str], list[str]] = {}
    for kind, model in MODELS.items():
        rows.setdefault((model.layer.name, "; ".join(served[kind])), []).append(kind)
    for (layer, names), kinds in rows.items():
        yield "transformers", quoted(kinds), layer, names


def of_fla(served: dict[str, list[str]]) -> Iterator[tuple[str, ...]]:
    """The rows of flash-linear-attention, one for each module of a family."""
    rows: dict[tuple[str, str], list[str]] = {}
    for kind, family in models.supported().items():
        names = served[kind] if family.of_transformers else called(family)
        rows.setdefault((title(kind), "; ".join(names) or "torch operations"), []).append(kind)
    for (layer, names), kinds in rows.items():
        yield "flash-linear-attention", quoted(kinds), layer, names


def title(kind: str) -> str:
    """The first line of the docstring of the module that defines a model type, with links to the papers."""
    from longspan.compat.fla.models import families as modules

    for path in sorted(Path(modules.__path__[0]).glob("[!_]*.py")):
        module = importlib.import_module(f"{modules.__name__}.{path.stem}")
        if kind in {family.model_type for family in module.FAMILIES}:
            line = cleandoc(module.__doc__ or "").splitlines()[0].removesuffix(".")
            return re.sub(r"\b\d{4}\.\d{5}\b", r"[\g<0>](https://arxiv.org/abs/\g<0>)", line)
    raise ValueError(f"no module of {modules.__name__} defines {kind}")


def called(family: Any) -> list[str]:
    """The operations that a small model of a family calls, short convolutions last."""
    with torch.random.fork_rng([]), torch.no_grad(), ops.watch() as uses:
        own = {name: value for name, value in SMALL.items() if name in family.options}
        model = family.model(family.config(**COMMON, **own, **SPECIAL.get(family.model_type, {})))
        model.eval()(torch.arange(7)[None])
    names = {use.op for use in uses}
    return [*sorted(names - {CONVOLUTION}), *(["short convolutions"] if CONVOLUTION in names else [])]


def quoted(names: Iterable[str]) -> str:
    """Names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


def supported() -> str:
    """The table of the supported model types."""
    served = parts()
    rows = (HEAD, ["---"] * len(HEAD), *of_transformers(served), *of_fla(served))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def refused() -> str:
    """A list of the model types of flash-linear-attention that are refused, by reason."""
    reasons: dict[str, list[str]] = {}
    for kind, reason in UNSERVED.items():
        reasons.setdefault(reason, []).append(kind)
    return "\n".join(f"* {quoted(kinds)}, {reason}" for reason, kinds in reasons.items())


def accelerated() -> str:
    """The types that ``accelerate()`` supports by layer, and the types around their text models."""
    layers: dict[str, list[str]] = {}
    for kind, model in MODELS.items():
        layers.setdefault(f"{model.layer.name}: {model.layer.about}", []).append(kind)
    rows = [("model types", "layers"), ("---", "---")]
    rows += [(quoted(kinds), layer) for layer, kinds in layers.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    around = f"Models around one of these text models are served where the text model is: {quoted(sorted(WRAPPERS))}."
    return f"{table}\n\n{fill(around, 128, break_on_hyphens=False)}"


def unpadded() -> str:
    """A list of the types that refuse padding between tokens, by reason."""
    reasons: dict[str, list[str]] = {}
    for kind, model in MODELS.items():
        if model.reads_padding:
            reasons.setdefault(model.reads_padding, []).append(kind)
    return "\n".join(f"* {quoted(kinds)}: {reason}" for reason, kinds in reasons.items())


PAGES = {
    DOCS / "how-to" / "run-recurrent-models.md": {"models": supported, "refused": refused},
    DOCS / "how-to" / "accelerate-hf-hybrids.md": {"models": accelerated, "unpadded": unpadded},
}
