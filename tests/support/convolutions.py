"""One token of the causal convolution by a form of it, on states of any strides and dtype."""

import torch

from longspan import backend, causal_convolution
from longspan.ops import watch
from ops.families import FAMILIES, assert_close, cast, limit


def check_step(form, *, dtypes, sizes, donate, more=0, tokens_last=False, taps_first=False, activation="silu"):
    """The new state is the inputs to the bit, in the strides and the dtype of the old one."""
    family, (dtype, kept) = FAMILIES["convolution"], dtypes
    given = family.operands(1, sizes, batch=3, more=more, dtype=dtype)
    given["state"] = given["state"].to(kept)
    if taps_first:
        given["weight"] = given["weight"].mT.contiguous().mT
    exact = family.run("reference", cast(given, torch.float64), activation=activation)
    if tokens_last:
        given["state"] = given["state"].mT.contiguous().mT
    before = given["state"].clone()
    with torch.no_grad(), backend(form), watch() as seen:
        y, state = causal_convolution(**given, activation=activation, donate=donate)
    assert [use.backend for use in seen] == [form]
    assert y.dtype is dtype
    assert_close([y], exact[:1], limit(family, form) if dtype is torch.float32 else torch.finfo(dtype).eps)
    assert state.double().equal(exact[1])
    assert (state.data_ptr() == given["state"].data_ptr()) is donate
    assert state.dtype is kept
    assert state.stride() == given["state"].stride()
    assert donate or given["state"].equal(before)
