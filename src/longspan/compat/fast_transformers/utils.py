"""Share weights between two modules."""

from torch import nn

from .recurrent.attention import RecurrentSums


def make_mirror(src_module: nn.Module, dst_module: nn.Module) -> None:
    """Make ``dst_module`` use the parameters and buffers of ``src_module``, now and as they change.

    Typically a batch model is trained and a recurrent mirror generates. The mirror draws no random features: it uses
    those of the last call of ``src_module``.

    Args:
        src_module: the module with the weights.
        dst_module: the module to change.

    Raises:
        ValueError: a parameter of ``src_module`` has no counterpart of the same name and shape.
    """
    theirs = dict(dst_module.named_modules(remove_duplicate=False))
    pairs = []
    for path, module in src_module.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            found = theirs[path]._parameters.get(name) if path in theirs else None
            if found is None or found.shape != parameter.shape:
                came = "none" if found is None else tuple(found.shape)
                full = f"{path}.{name}".lstrip(".")
                raise ValueError(f"{full} {tuple(parameter.shape)} has no counterpart in the mirror, which has {came}")
        if path in theirs:
            pairs.append((module, theirs[path]))
    for module, mirror in pairs:
        for name, parameter in module.named_parameters(recurse=False):
            setattr(mirror, name, parameter)
        if module._buffers.keys() == mirror._buffers.keys():
            # The same dictionary: a buffer that is replaced later, as redrawn features are, is replaced in both.
            mirror._buffers = module._buffers
        else:
            mirror._buffers.update({n: b for n, b in module._buffers.items() if n in mirror._buffers})
        if isinstance(mirror, RecurrentSums):
            mirror.mirrors = True
