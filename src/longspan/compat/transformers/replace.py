"""Replace functions in the files of transformers, and restore them."""

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from . import convolution, decoding, packing, undoing
from . import lazy_logits as lazy
from .branches import SERVED
from .counting import counted
from .models import ATTRIBUTES, INDEXERS, MODELS, UNSERVED, UNSERVED_LAYERS, Layer, Model, Ours
from .record import Replaced, replaced, untouched, version
from .report import Status, status

# The first version of transformers whose caches can undo tokens with our recurrences, and whose indexers are served.
UNDOES = (5, 24)


def accelerate(model: nn.Module | None = None, *, lazy_logits: bool = False) -> Status:
    """Run the recurrent layers of transformers, and the indexers of some softmax layers, on longspan's CPU kernels.

    It applies to all models of the supported types in this process, until ``restore()``. A second call adds types that
    are new. Calls on other devices, and calls that are compiled, exported or traced, run the original code.

    Args:
        model: replace the functions of this model's types only; None means all supported types, for models loaded
            before or after the call. Before transformers 5.15, pass a model that is loaded already, because its layers
            keep their functions.
        lazy_logits: In training, compute the logits of ``model``, a causal language model, only if they are read, and
            its loss from a part of them at a time (``longspan.linear_cross_entropy``). This saves most of the memory of
            a step of a model with a large vocabulary. It works on any device.

    Returns:
        ``status()``.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers is older than 5.5 or newer than 5.24, ``model`` is not an ``nn.Module``, or its logits
            cannot be lazy.
    """
    version()
    from . import quantizer  # noqa: F401 (from then on, from_pretrained loads quantized models)

    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(f"accelerate takes a model, or None for all model types, not {type(model).__name__}")
    if lazy_logits:
        _lazy_logits(model)
    if model is None:
        untouched.update(UNSERVED | UNSERVED_LAYERS)
    for module in _modules(model):
        _module(module)
    _cache()
    for layer in () if model is None else model.modules():
        kind = _model(type(layer).__module__)
        for name, ours in ATTRIBUTES.items():
            if callable(found := layer.__dict__.get(name)):
                _replace(kind, f"{type(layer).__name__}.{name}", layer, name, found, ours)
    known = MODELS.keys() | INDEXERS
    if model is not None and not any(_model(type(m).__module__) in known for m in model.modules()):
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        untouched[kind] = UNSERVED.get(kind, "it has no recurrent layer that longspan knows")
    return status()


def _lazy_logits(model: nn.Module | None) -> None:
    if model is None:
        raise ValueError("lazy_logits=True needs a model")
    # A model with adapters of peft holds the one that computes the loss.
    whole: Any = getattr(model, "get_base_model", lambda: model)()
    if isinstance(whole.__dict__.get("_loss_function"), functools.partial):
        return
    if reason := lazy.why_not(whole):
        raise ValueError(f"the logits of {type(whole).__name__} cannot be lazy: {reason}")
    head, usual, kind = lazy.output_layer(whole), whole.loss_function, _model(type(whole).__module__)
    _put(Replaced(kind, "lm_head.forward", head, "forward", head.forward), types.MethodType(lazy.forward, head))
    _put(Replaced(kind, "loss_function", whole, "_loss_function", usual), functools.partial(lazy.loss, usual))


def restore() -> None:
    """Undo ``accelerate``; without it nothing changes."""
    for one in reversed(replaced):
        # Keep a function that other code has put there since.
        if one.owner.__dict__.get(one.attribute) is one.put:
            if one.inherited:
                delattr(one.owner, one.attribute)
            else:
                setattr(one.owner, one.attribute, one.original)
        one.active = False  # for code that kept a reference to the function
    replaced.clear()
    untouched.clear()
    decoding.stepped.clear()


def _types() -> set[str]:
    return {one.model for one in replaced}


def _model(module: str) -> str:
    """Return ``qwen3_next`` for ``transformers.models.qwen3_next.modeling_qwen3_next``, else the last part."""
    return module.rpartition(".")[2].removeprefix("modeling_")


def _modules(model: nn.Module | None) -> Iterator[ModuleType]:
    if model is not None:
        names = dict.fromkeys(type(layer).__module__ for layer in model.modules())
        yield from (sys.modules[name] for name in names if name.rpartition(".")[2].startswith("modeling_"))
        return
    for name in (*MODELS, *INDEXERS):
        try:
            yield importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except ImportError:
            untouched[name] = "this version of transformers does not have it"


def _module(module: ModuleType) -> None:
    """Replace the supported functions of a modeling file, and tell its layers of packed rows and padding."""
    kind = _model(module.__name__)
    for name, why in UNSERVED_LAYERS.items():
        outer, _, layer = name.partition(".")
        if outer == kind and layer in module.__dict__:
            untouched[name] = why
    # Earlier indexers return masks.
    for name, ours in INDEXERS.get(kind, {}).items() if version() >= UNDOES else ():
        owner, attribute = _owner(module, name)
        _replace(kind, name, owner, attribute, getattr(owner, attribute), ours)
    if kind not in MODELS:
        return
    model, layer = MODELS[kind], MODELS[kind].layer
    if version() < model.since:
        untouched[kind] = f"longspan supports it from transformers {_dotted(model.since)} on"
        return
    new = _replace_functions(module, kind, layer)
    refused = model.leaks
    if any(one.owner is module for one in new) and all(one.name != "causal_conv1d_fn" for one in new):
        refused = "its short convolutions look across sequences before transformers 5.15"
    if version() < layer.continues:
        untouched[f"{kind}.cache"] = (
            f"transformers before {_dotted(layer.continues)} reads several tokens after a cache as a new sequence"
        )
    if not new:
        if kind in _types():
            return
        # None of its functions is replaced, but its packed rows would leak too.
        untouched[kind] = refused = (
            "its layer is one function before transformers 5.15, so longspan cannot replace its recurrence"
        )
    _wrap_models(module, kind, model, refused)
    for name, wrapper in model.wrappers.items():
        owner, attribute = _owner(module, name)
        if owner is not None:
            original: Any = getattr(owner, attribute, None)  # None for a method that only ours has
            _put(Replaced(kind, name, owner, attribute, original, part=wrapper.part), wrapper.wrap(original))


def _replace_functions(module: ModuleType, kind: str, layer: Layer) -> list[Replaced]:
    """Replace the functions of a recurrent layer that a modeling file has, and return those that are new."""
    before = len(replaced)
    for name, ours in layer.functions.items():
        owner, attribute = _owner(module, name)
        if callable(original := getattr(owner, attribute, None)):
            _replace(kind, name, owner, attribute, original, ours)
    return replaced[before:]


def _wrap_models(module: ModuleType, kind: str, model: Model, refused: str) -> None:
    """Wrap a file's models and masks, so that layers know packed rows, unless ``refused``, and padding."""
    reads_padding, undoes = model.reads_padding, version() >= UNDOES and not model.no_drafts
    if model.no_drafts:
        untouched[f"{kind}.drafts"] = model.no_drafts
    if version() < model.layer.skips:
        reads_padding = f"transformers before {_dotted(model.layer.skips)} keeps padding in the states of its layers"
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        if name in module.__dict__:
            original = module.__dict__[name]
            _put(Replaced(kind, name, module, name, original), packing.masked(original))
    for name, owner in list(module.__dict__.items()):
        if inspect.isclass(owner) and owner.__module__ == module.__name__ and _is_model(owner):
            original = owner.__dict__["forward"]
            steps = kind in SERVED and name.endswith("ForCausalLM") and version() >= decoding.SINCE
            one = Replaced(kind, f"{name}.forward", owner, "forward", original, steps)
            passed = packing.pass_rows(original, refused, reads_padding, model.numbers_anew)
            if steps:
                decoding.stepped[kind] = one.calls
            _put(one, decoding.stepping(passed, kind) if steps else passed)
        if inspect.isclass(owner) and owner.__dict__.get("_is_stateful") is True and undoes:
            # ``generate`` refuses drafts for models with it, whatever their cache can undo.
            setattr(owner, "_is_stateful", False)  # noqa: B010 (an attribute that a type does not have)
            replaced.append(Replaced(kind, f"{name}._is_stateful", owner, "_is_stateful", True, put=False))


def _owner(module: ModuleType, name: str) -> tuple[Any, str]:
    """Return the module and ``function``, or the class and ``method`` of ``Class.method``; None for no such class."""
    owner, _, attribute = name.rpartition(".")
    return (module.__dict__.get(owner) if owner else module), attribute


def _dotted(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"


def _cache() -> None:
    """Make transformers' caches undo tokens, and keep the last real tokens of convolutions."""
    from transformers import cache_utils

    owner: Any = getattr(cache_utils, "LinearAttentionLayer", None)
    if owner is not None and "conv_kernel_size" in inspect.signature(owner.update_conv_state).parameters:
        one = Replaced(
            "", "LinearAttentionLayer.update_conv_state", owner, "update_conv_state", owner.update_conv_state
        )
        _put(one, convolution.with_real_tokens(one.original))
    if version() < UNDOES:
        return
    layer: Any = cache_utils.LinearAttentionCacheLayerMixin
    for owner, name, wrap in (
        (cache_utils.Cache, "get_recurrent_state", undoing.noting),
        (cache_utils.Cache, "get_conv_state", undoing.whole_windows),
        (cache_utils.Cache, "get_seq_length", undoing.counting),
        (layer, "is_croppable", undoing.croppable),
        (layer, "crop", undoing.cropping),
    ):
        one = Replaced("", f"{owner.__name__}.{name}", owner, name, owner.__dict__[name])
        _put(one, wrap(one.original))


def _is_model(owner: type) -> bool:
    """Return whether a class is a model with its own ``forward`` that takes tokens."""
    from transformers import PreTrainedModel

    if not issubclass(owner, PreTrainedModel) or "forward" not in owner.__dict__:
        return False
    return "input_ids" in inspect.signature(owner.__dict__["forward"]).parameters


def _replace(kind: str, name: str, owner: Any, attribute: str, original: Callable, ours: Ours) -> None:
    if hasattr(original, "__longspan__"):
        return
    wanted, known = (inspect.signature(f).parameters for f in (original, ours.run))
    more = [p.name for p in wanted.values() if p.name not in known and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if more and not any(p.kind == p.VAR_POSITIONAL for p in known.values()):
        untouched[f"{kind}.{name}"] = f"longspan does not know its parameters {', '.join(more)}"
        return
    one = Replaced(kind, name, owner, attribute, original, ours.counts, ours.part)
    _put(one, _dispatch(one, ours))


def _put(one: Replaced, new: Any) -> None:
    if hasattr(_function(one.original), "__longspan__"):
        return
    _function(new).__longspan__ = True
    one.put, one.inherited = new, one.attribute not in one.owner.__dict__
    setattr(one.owner, one.attribute, new)
    replaced.append(one)


def _function(put: Any) -> Any:
    return put.fget if isinstance(put, property) else getattr(put, "__func__", put)


def _dispatch(one: Replaced, ours: Ours) -> Callable:
    """Return a function that passes each call to ours or to the original, and counts it."""
    original, calls, check, replacement = one.original, one.calls, ours.why_not, ours.run

    @functools.wraps(original)
    def run(*args, **kwargs):
        # First, so that a compiler sees only the original.
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not one.active:  # pyright: ignore[reportPrivateImportUsage] (documented by torch)
            return original(*args, **kwargs)
        why_not = _elsewhere(args, kwargs)
        if not why_not and check is not None:
            why_not = check(*args, **kwargs)
        if why_not:
            calls[f"the original, since {why_not}"] += 1
            return original(*args, **kwargs)
        with counted(calls):
            return replacement(*args, **kwargs)

    return run


def _elsewhere(args: tuple, kwargs: dict[str, Any]) -> str:
    for t in (*args, *kwargs.values()):
        if isinstance(t, Tensor) and not t.is_cpu:
            return f"they are on {t.device.type}"
    return ""
