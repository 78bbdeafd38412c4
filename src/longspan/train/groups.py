"""Parameter groups: which parameters weight decay shrinks, and which it leaves alone."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters of ``model`` in two groups for an optimiser: with weight decay, and without.

    Without are all vectors and scalars (biases, gains of norms, decays, gates), embeddings and tables of positions,
    and what a module names in its class attribute ``no_decay``: parameters of two dimensions or more that are decays,
    scales, biases or learned tokens. The matrices and filters that are left are decayed. Tied parameters count once.

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
        # An option may leave a part out.
        parts += [getattr(module, name, None) for name in getattr(module, "no_decay", ())]
        for part in parts:
            spared.update(map(id, part.parameters() if isinstance(part, nn.Module) else [part]))
    groups: tuple[list, list] = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[parameter.ndim < 2 or id(parameter) in spared].append(parameter)
    return [{"params": groups[0], "weight_decay": weight_decay}, {"params": groups[1], "weight_decay": 0.0}]
