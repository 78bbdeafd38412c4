"""Small decoders for pools, what they draw alone, models that pass calls on, and free slots full of NaN."""

import torch
from torch.utils import _pytree as pytree

import longspan


def decoder(attention="gated_deltanet", vocab=256, seed=0):
    """A small model of bytes, with random weights."""
    torch.manual_seed(seed)
    config = {"vocab": vocab, "positions": "none", "dim": 16, "heads": 2, "depth": 2, "attention": attention}
    return longspan.Decoder(longspan.DecoderConfig(**config)).eval()


def alone(model, prompt, n):
    """The n most likely tokens after a prompt of tokens, drawn without a pool."""
    tokens = torch.tensor([list(prompt)], dtype=torch.long)
    return longspan.generate(model, tokens, max_new_tokens=n, temperature=0)[0].tolist()


def spoiled(pool):
    """The pool, after its free slots are filled with NaN."""
    for t in pytree.tree_leaves(pool.state):
        if t.is_floating_point():
            t[pool.live :] = float("nan")
    return pool


class Wrapped:
    """A model that passes everything on to another one; tests replace its calls."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *args, **options):
        return self._model(*args, **options)


class Failing(Wrapped):
    """A model whose calls raise."""

    def __call__(self, *args, **options):
        raise RuntimeError("broken")
