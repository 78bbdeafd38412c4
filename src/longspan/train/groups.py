"""Parameter groups with and without weight decay."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of a model into two optimizer groups, with and without weight decay.

    Vectors and scalars (biases, gains of norms, decays, gates), embeddings and position tables are not decayed. Neither
    are parameters that a module lists in its class attribute ``no_decay``: decays, scales, biases or learned tokens of
    two or more dimensions. All other matrices and filters are decayed. Tied parameters count once.

    Args:
        model: any module.
        weight_decay: the decay of the first group.

    Returns:
        Two parameter groups for an optimizer: with ``weight_decay``, and with 0.

    Example:

    >>> import longspan, torch
    >>> from longspan.train import parameter_groups
    >>> model = longspan.Decoder(longspan.DecoderConfig(dim=8, depth=1, heads=2, feedforward=16, attention="kda"))
    >>> optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)
    >>> [group["weight_decay"] for group in optimizer.param_groups]
    [0.1, 0.0]
    """
    spared = set()
    for module in model.modules():
        parts = [module] if isinstance(module, nn.Embedding) else []
        # Some parts exist only with certain options.
        parts += [getattr(module, name, None) for name in getattr(module, "no_decay", ())]
        for part in parts:
            spared.update(map(id, part.parameters() if isinstance(part, nn.Module) else [part]))
    groups: tuple[list, list] = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[parameter.ndim < 2 or id(parameter) in spared].append(parameter)
    return [{"params": groups[0], "weight_decay": weight_decay}, {"params": groups[1], "weight_decay": 0.0}]
