"""``nn.MultiheadAttention`` around any mechanism: torch's arguments and torch's state dict."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.tensors import split
from ..states.kv_cache import CacheView
from . import Attention, build
from .softmax import Softmax
from .validation import check_x

PROJECTIONS = ("query", "key", "value", "out")


class MultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose softmax is any mechanism: ``attention="softmax"`` gives torch's own outputs.

    >>> import torch, longspan
    >>> attention = longspan.MultiheadAttention(64, 4, batch_first=True, attention="linear")
    >>> x = torch.randn(2, 100, 64)
    >>> y, _ = attention(x, x, x, need_weights=False, is_causal=True)
    >>> y.shape
    torch.Size([2, 100, 64])

    Arguments, parameters (``in_proj_weight``, ``in_proj_bias``, ``out_proj``), their initial values and the state dict
    are torch's, so weights load both ways. ``attention`` is the spec of a mechanism with query, key, value and output
    projections of ``embed_dim`` rows each; what it learns besides (gates, decays, convolutions) is in the state dict
    under ``attention.``. ``bias`` decides on the biases of these four projections, whatever the mechanism has alone.

    Masks are torch's here, and nowhere else in longspan: True hides. ``dropout`` needs a mechanism that has the option.
    ``add_bias_kv`` and ``add_zero_attn`` are refused.

    Raises ValueError for a spec that does not fit, and for arguments that the mechanism cannot serve.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = "linear",
    ):
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise ValueError(f"{name}=True adds a key that belongs to no token; it is not served, leave it out")
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}")
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self._forms = _forms(attention, embed_dim, num_heads)
        for form in self._forms.values():
            if dropout and not hasattr(form, "dropout"):
                raise ValueError(f"{form.name} has no weights to drop; leave dropout={dropout} out")
            if dropout:
                form.dropout = dropout  # type: ignore[assignment]
            # Cross attention brings keys and values side by side; each projection takes its part.
            form.context_dim = self.kdim + self.vdim  # type: ignore[assignment]
        self.attention = next(iter(self._forms.values()))
        for name in PROJECTIONS:
            setattr(self.attention, name, _Projection(self, name))
        self.attention.to(device=device, dtype=dtype)

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # Or else torch's encoder layer takes our weights in evaluation and computes softmax with them itself.
        self._qkv_same_embed_dim = False

    def train(self, mode: bool = True) -> "MultiheadAttention":
        """See ``nn.Module.train``."""
        for form in self._forms.values():
            form.train(mode)
        return super().train(mode)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query (L,B,E), key (S,B,kdim), value (S,B,vdim) -> (L,B,E), and the weights (B,L,S) if asked for, else None.

        With ``batch_first`` the batch is the first axis; without a batch there are two axes. Self-attention is
        ``attention(x, x, x)`` with one and the same tensor; a mechanism without cross attention serves no other call.

        key_padding_mask (B,S): True, or -inf, on padding. The output of a padded token is zero, except with softmax,
        where it is torch's. attn_mask (L,S) or (B num_heads,L,S): True, or -inf, hides. One that hides what comes later
        is recognised as causal, one that hides nothing as none; others are served by softmax alone. ``is_causal=True``
        is causal with or without attn_mask. A query that sees no key gets zeros, where torch gives NaN.
        need_weights: costs O(L S), and is served by mechanisms with an attention matrix; averaged over the heads, or
        with ``average_attn_weights=False`` (B,num_heads,L,S). With dropout they are those before it.

        Raises ValueError for arguments of another shape, and for what the mechanism does not serve.
        """
        alone, batched = query is key and key is value, query.dim() == 3
        self._check(query, key, value)
        query, key, value = (self._batch_first(t) for t in (query, key, value))
        (batch, n, _), m = query.shape, key.shape[1]
        real = None
        if key_padding_mask is not None:
            hidden = _hidden("key_padding_mask", key_padding_mask, ((batch, m) if batched else (m,),))
            real = ~hidden.view(batch, m)
        causal, seen = self._visible(attn_mask, is_causal, batch, n, m)
        record: dict[str, Any] | None = {} if need_weights else None
        form = self._form(causal)
        if need_weights and "record" not in form.supported_args:
            raise ValueError(f"{form.name} has no attention matrix to return; call with need_weights=False")
        if isinstance(form, Softmax) and not form.rotary:
            y = self._softmax(form, query, key, value, real, causal, seen, record)
        elif seen is not None:
            raise ValueError(
                f"{form.name} serves an attn_mask that hides what comes later, or nothing, not another one; "
                f"mask tokens by key_padding_mask, or choose attention='softmax'"
            )
        elif alone:
            y, _ = form(query, mask=real, record=record)
        elif "context" not in form.supported_args or causal:
            what = "causal " if causal else "self-"
            raise ValueError(
                f"{form.name} serves {what}attention of one sequence, attention(x, x, x) with one and the same "
                f"tensor; here query, key and value differ"
            )
        else:
            y, _ = form(query, context=torch.cat([key, value], -1), context_mask=real, record=record)
        weights = None if record is None else self._weights(record, form, average_attn_weights)
        if not batched:
            return y[0], None if weights is None else weights[0]
        return (y if self.batch_first else y.transpose(0, 1)), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested:
            raise ValueError(
                "nested tensors are not served; build nn.TransformerEncoder with enable_nested_tensor=False, or give "
                "padded tensors and key_padding_mask"
            )
        given = {"query": query, "key": key, "value": value}
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        alike = all(t.dim() == query.dim() in (2, 3) and t.shape[-1] == widths[name] for name, t in given.items())
        if alike:
            q, k, v = (self._batch_first(t).shape[:2] for t in given.values())
            alike = q[0] == k[0] and k == v
        if not alike:
            axes = "B, {}, {}" if self.batch_first else "{}, B, {}"
            wanted = ", ".join(f"{n} ({axes.format('L' if n == 'query' else 'S', w)})" for n, w in widths.items())
            came = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items())
            raise ValueError(f"the shapes must be {wanted}, or these without the batch B; they are {came}")
        check_x(self.attention, self.embed_dim, self._batch_first(query))

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _form(self, causal: bool) -> Attention:
        if causal not in self._forms:
            what = "causal" if causal else "bidirectional"
            hint = "leave is_causal and attn_mask out" if causal else "call with is_causal=True"
            raise ValueError(f"{self.attention.spec} has no {what} form; {hint}")
        return self._forms[causal]

    def _visible(self, mask: Tensor | None, is_causal: bool, batch: int, n: int, m: int) -> tuple[bool, Tensor | None]:
        """Whether the call is causal, and who may see whom otherwise: bool (B|1,H|1,N,M), or None for all."""
        if mask is None:
            return is_causal, None
        hidden = _hidden("attn_mask", mask, ((n, m), (batch * self.num_heads, n, m)))
        if torch.compiler.is_compiling():
            # The values are not known yet.
            if is_causal:
                return True, None
        elif torch.equal(hidden, torch.ones(n, m, dtype=torch.bool, device=mask.device).triu(1).expand_as(hidden)):
            return True, None
        elif is_causal:
            raise ValueError(
                "is_causal=True says that attn_mask hides all that comes later and nothing else; it does not"
            )
        elif not hidden.any():
            return False, None
        return False, ~hidden.view(-1, self.num_heads if hidden.dim() == 3 else 1, n, m)

    def _softmax(self, form, query, key, value, real, causal, seen, record) -> Tensor:
        """Softmax under any mask, with keys and values of any origin."""
        given = {"query": query, "key": key, "value": value}
        q, k, v = (split(self._project(name, t), self.num_heads) for name, t in given.items())
        if causal and (real is not None or q.shape[2] != k.shape[2]):
            causal, seen = False, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        if real is not None:
            real = real[:, None, None, :]
            seen = real if seen is None else seen & real
        return form.read(q, CacheView(k, v, seen, causal), record)

    def _weights(self, record: dict[str, Any], form: Attention, average: bool) -> Tensor:
        if "matrix" not in record:
            raise ValueError(f"{form.name} has no attention matrix to return; call with need_weights=False")
        return record["matrix"].mean(1) if average else record["matrix"]

    def _weight(self, name: str) -> Tensor:
        """The rows that make queries, keys or values: (embed_dim, width of their input); or those of the output."""
        if name == "out":
            return self.out_proj.weight
        if self.in_proj_weight is None:
            return {"query": self.q_proj_weight, "key": self.k_proj_weight, "value": self.v_proj_weight}[name]
        return self.in_proj_weight[self._rows(name)]

    def _project(self, name: str, x: Tensor) -> Tensor:
        """x through the projection of this name, one of query, key, value and out."""
        if name == "out":
            return self.out_proj(x)
        if x.shape[-1] == self.kdim + self.vdim and name != "query":
            x = x[..., : self.kdim] if name == "key" else x[..., self.kdim :]
        return F.linear(
            x, self._weight(name), None if self.in_proj_bias is None else self.in_proj_bias[self._rows(name)]
        )

    def _rows(self, name: str) -> slice:
        first = PROJECTIONS.index(name) * self.embed_dim
        return slice(first, first + self.embed_dim)


class _Projection(nn.Module):
    """Stands where a mechanism has a linear map of its own; the weights are those of the module around it."""

    def __init__(self, owner: MultiheadAttention, name: str):
        super().__init__()
        # In a tuple, since a module as an attribute would be a child.
        self.owner, self.name, self.out_features = (owner,), name, owner.embed_dim

    @property
    def weight(self) -> Tensor:
        return self.owner[0]._weight(self.name)

    def forward(self, x: Tensor) -> Tensor:
        return self.owner[0]._project(self.name, x)

    def extra_repr(self) -> str:
        return self.name


def _forms(spec: str, dim: int, heads: int) -> dict[bool, Attention]:
    """The bidirectional and the causal form of a mechanism, those that exist, with one set of parameters."""
    forms: dict[bool, Attention] = {}
    refused: ValueError | None = None
    for causal in (False, True):
        try:
            with torch.random.fork_rng(devices=[], enabled=bool(forms)):
                forms[causal] = build(spec, dim, heads, causal=causal)
        except ValueError as error:
            refused = refused or error
    if not forms:
        assert refused is not None
        raise refused
    first, *others = forms.values()
    for name in PROJECTIONS:
        part = getattr(first, name, None)
        if not isinstance(part, nn.Linear) or (part.in_features, part.out_features) != (dim, dim):
            has = f"one of {part.in_features} x {part.out_features}" if isinstance(part, nn.Linear) else "none"
            raise ValueError(
                f"attention={spec!r} does not fit torch's weights, which have a {name} projection of {dim} x {dim}; "
                f"it has {has}"
            )
    for other in others:
        # The dictionaries themselves, so that whatever replaces a parameter or a module does so for both.
        other.__dict__.update(_parameters=first._parameters, _buffers=first._buffers, _modules=first._modules)
    return forms


def _hidden(name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    """A mask of torch's as bool, True where it hides. Raises ValueError for another shape or a bias."""
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must be {' or '.join(map(str, shapes))}, not {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be bool, True where it hides, or 0 and -inf, not {mask.dtype}")
    hidden = mask == -torch.inf
    plain = (hidden | (mask == 0)).all()
    said = f"{name} adds numbers to the scores; only 0 and -inf are served (alibi and others have biases of their own)"
    if torch.compiler.is_compiling():
        torch._assert_async(plain, said)  # pyright: ignore
    elif not plain:
        raise ValueError(said)
    return hidden
