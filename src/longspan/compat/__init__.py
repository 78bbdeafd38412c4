"""Other libraries' interfaces on longspan's operations, for code that was written for them."""

import importlib
import importlib.util
import sys
from types import ModuleType

NAME = "fast_transformers"
_SOURCE = f"{__name__}.{NAME}"

_MODULES = (
    "aggregate",
    "attention",
    "attention.aft_attention",
    "attention.attention_layer",
    "attention.causal_linear_attention",
    "attention.clustered_attention",
    "attention.conditional_full_attention",
    "attention.exact_topk_attention",
    "attention.full_attention",
    "attention.linear_attention",
    "attention.local_attention",
    "attention.reformer_attention",
    "attention_registry",
    "builders",
    "builders.attention_builders",
    "builders.base",
    "builders.transformer_builders",
    "causal_product",
    "clustering",
    "clustering.hamming",
    "events",
    "events.event",
    "events.event_dispatcher",
    "events.filters",
    "feature_maps",
    "feature_maps.base",
    "feature_maps.fourier_features",
    "hashing",
    "masking",
    "recurrent",
    "recurrent.attention",
    "recurrent.transformers",
    "sparse_product",
    "transformers",
    "utils",
    "weight_mapper",
)

# Several modules of the original are one module here.
_MERGED = {
    "attention.improved_clustered_attention": "attention.clustered_attention",
    "attention.improved_clustered_causal_attention": "attention.clustered_attention",
    "attention_registry.registry": "attention_registry",
    "attention_registry.spec": "attention_registry",
    # Other packages import these only to test whether kernels exist.
    "causal_product.causal_product_cpu": "causal_product",
    "causal_product.causal_product_cuda": "causal_product",
    "recurrent._utils": "recurrent.attention",
    **{
        f"recurrent.attention.{kind}{rest}": "recurrent.attention"
        for kind in ("self_attention", "cross_attention")
        for rest in ("", ".attention_layer", ".full_attention", ".linear_attention")
    },
}

# Modules that install() put under the name, and modules that they replaced.
_installed: dict[str, ModuleType] = {}
_displaced: dict[str, ModuleType] = {}


def install(*, replace: bool = False) -> None:
    """Make ``import fast_transformers`` find ``longspan.compat.fast_transformers``.

    It applies to this process, until ``uninstall()``. A second call changes nothing. Call it before the first import of
    fast_transformers: names that were imported earlier keep their values.

    Args:
        replace: replace the real fast_transformers if it is installed or imported. Its files do not change.

    Raises:
        ValueError: the real fast_transformers is installed or imported, and ``replace`` is False.
    """
    if _installed:
        return
    real = {name: module for name, module in sys.modules.items() if name == NAME or name.startswith(f"{NAME}.")}
    if not replace and (real or importlib.util.find_spec(NAME) is not None):
        how = "already imported" if real else "installed here"
        raise ValueError(
            f"{NAME} is {how}; install(replace=True) replaces it in this process and does not change its files"
        )
    found = _modules()
    for name in real:
        _displaced[name] = sys.modules.pop(name)
    _installed.update(found)
    sys.modules.update(found)


def uninstall() -> None:
    """Undo ``install()``, so that imports find the real package, if any. Without ``install()`` nothing changes."""
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    sys.modules.update(_displaced)
    _installed.clear()
    _displaced.clear()


def _modules() -> dict[str, ModuleType]:
    """Return our modules by the original's names."""
    absent = importlib.import_module(f"{_SOURCE}.absent")
    found = {NAME: importlib.import_module(_SOURCE)}
    for name in _MODULES:
        found[f"{NAME}.{name}"] = importlib.import_module(f"{_SOURCE}.{name}")
    for name, functions in absent.FUNCTIONS.items():
        module = ModuleType(f"{NAME}.{name}", "Not carried over: its functions raise NotImplementedError when called.")
        for function in functions:
            setattr(module, function, absent.function(f"{name}.{function}"))
        found[f"{NAME}.{name}"] = module
    for name, ours in _MERGED.items():
        found[f"{NAME}.{name}"] = importlib.import_module(f"{_SOURCE}.{ours}")
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        # `import a.b as c` reads an attribute of a. An attribute that exists is not replaced.
        if parent and child not in vars(found[parent]):
            setattr(found[parent], child, module)
    return found
