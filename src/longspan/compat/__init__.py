"""Other libraries' interfaces on longspan's operations, for code that was written for them."""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from .stand_in import StandIn

NAME = "fast_transformers"
_SOURCE = f"{__name__}.{NAME}"

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


def _modules() -> dict[str, ModuleType]:
    """Return our modules by the original's names."""
    package = importlib.import_module(_SOURCE)
    found = {NAME: package}
    for info in pkgutil.walk_packages(package.__path__, f"{_SOURCE}."):
        found[NAME + info.name.removeprefix(_SOURCE)] = importlib.import_module(info.name)
    absent: Any = found.pop(f"{NAME}.absent")  # not a module of the original
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


_stand_in = StandIn(NAME, _modules)
install, uninstall = _stand_in.install, _stand_in.uninstall
