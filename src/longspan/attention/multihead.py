"""``nn.MultiheadAttention`` with any mechanism in place of softmax."""

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils import model_memory
from ..ops.tensors import split
from ..states.kv_cache import CacheView
from . import Attention, build
from .base import own_options
from .softmax import Softmax
from .validation import check_x

PROJECTIONS = ("query", "key", "value", "out")


class MultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with any mechanism; ``attention="softmax"`` gives the outputs of torch.

    Arguments, parameters (``in_proj_weight``, ``in_proj_bias``, ``out_proj``), their initial values and the state dict
    are those of torch, so weights load in both directions. Other parameters of the mechanism, such as gates, decays and
    convolutions, are in the state dict under ``attention.``.

    Masks follow torch, and only in this class of longspan: True hides.

    Args:
        embed_dim: Width of the query and of the output.
        num_heads: Number of heads; it divides ``embed_dim``.
        dropout: Probability of dropping a weight in training; needs a mechanism with a ``dropout`` option.
        bias: Whether the four projections have biases, whatever the default of the mechanism.
        add_bias_kv: Must be False.
        add_zero_attn: Must be False.
        kdim: Width of the key; default: ``embed_dim``.
        vdim: Width of the value; default: ``embed_dim``.
        batch_first: Whether the batch is the first axis.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        attention: Spec of a mechanism with query, key, value and output projections of ``embed_dim`` rows each.

    Raises:
        ValueError: For a mechanism whose projections do not fit, and for an option that it does not support.

    Example:
        >>> import torch, longspan
        >>> attention = longspan.MultiheadAttention(64, 4, batch_first=True, attention="linear")
        >>> x = torch.randn(2, 100, 64)
        >>> y, _ = attention(x, x, x, need_weights=False, is_causal=True)
        >>> y.shape
        torch.Size([2, 100, 64])
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
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = "linear",
    ):
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise ValueError(f"{name}=True is not supported, since it adds a key without a token")
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
                raise ValueError(f"dropout={dropout} needs a mechanism with a dropout option; {form.name} has none")
            if dropout:
                form.dropout = dropout  # pyright: ignore[reportArgumentType]  # the stubs know tensors and modules only
            # In cross attention the context is keys and values concatenated; each projection takes its part.
            form.context_dim = self.kdim + self.vdim
        self.attention = next(iter(self._forms.values()))
        for name in PROJECTIONS:
            setattr(self.attention, name, _Projection(self, name))
        self.attention.to(device=device, dtype=dtype)

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self._joint
        super()._reset_parameters()
        # Otherwise the fast path of torch's encoder layer computes softmax with these weights in evaluation.
        self._qkv_same_embed_dim = False

    @property
    def _joint(self) -> bool:
        """Whether queries, keys and values share ``in_proj_weight``, which torch sets to None otherwise."""
        return self.in_proj_weight is not None  # pyright: ignore[reportUnnecessaryComparison]  # the stubs lack None

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
        """Attend from the query to keys and values.

        Self-attention is ``attention(x, x, x)`` with the same tensor three times. Different tensors need a mechanism
        with cross attention. With ``batch_first`` the batch is the first axis. Without a batch there are two axes.

        Args:
            query: (L,B,E), with E = ``embed_dim``.
            key: (S,B,kdim).
            value: (S,B,vdim).
            key_padding_mask: (B,S), True or -inf on padding. The output of a padded token is zero; with softmax it is
                that of torch.
            need_weights: Return the weights, for mechanisms with an attention matrix. Costs O(L S).
            attn_mask: (L,S) or (B num_heads,L,S), True or -inf on hidden pairs. A mask that hides exactly the later
                keys makes the call causal; only softmax supports masks that hide other pairs. A query that sees no key
                gets zeros, where torch gives NaN.
            average_attn_weights: Average the weights over the heads.
            is_causal: Causal attention, with or without ``attn_mask``.

        Returns:
            The output (L,B,E) and the weights before dropout, or None without ``need_weights``. Weights are (B,L,S), or
            (B,num_heads,L,S) without ``average_attn_weights``.

        Raises:
            ValueError: For arguments of a wrong shape or dtype, and for what the mechanism does not support.
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
                f"{form.name} supports only an attn_mask that hides exactly the later keys, or nothing; mask tokens by "
                f"key_padding_mask, or use attention='softmax'"
            )
        elif alone:
            y, _ = form(query, mask=real, record=record)
        elif "context" not in form.supported_args or causal:
            what = "causal" if causal else "bidirectional"
            raise ValueError(
                f"query, key and value must be the same tensor: {form.name} has no {what} cross attention; call "
                f"attention(x, x, x)"
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
                "nested tensors are not supported; build nn.TransformerEncoder with enable_nested_tensor=False, or "
                "pass padded tensors and key_padding_mask"
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
            found = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items())
            raise ValueError(f"the shapes must be {wanted}, or these without the batch B, not {found}")
        check_x(self.attention, self.embed_dim, self._batch_first(query))

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _form(self, causal: bool) -> Attention:
        if causal not in self._forms:
            what = "causal" if causal else "bidirectional"
            hint = "call without is_causal and attn_mask" if causal else "call with is_causal=True"
            raise ValueError(f"{self.attention.spec} has no {what} form; {hint}")
        return self._forms[causal]

    def _visible(self, mask: Tensor | None, is_causal: bool, batch: int, n: int, m: int) -> tuple[bool, Tensor | None]:
        """Whether the call is causal; otherwise also the visible pairs, bool (B|1,H|1,N,M), or None for all."""
        if mask is None:
            return is_causal, None
        hidden = _hidden("attn_mask", mask, ((n, m), (batch * self.num_heads, n, m)))
        if torch.compiler.is_compiling():
            # Values are unknown while a compiler traces.
            if is_causal:
                return True, None
        elif torch.equal(hidden, torch.ones(n, m, dtype=torch.bool, device=mask.device).triu(1).expand_as(hidden)):
            return True, None
        elif is_causal:
            raise ValueError("is_causal=True needs an attn_mask that hides exactly the later keys, or no attn_mask")
        elif not hidden.any():
            return False, None
        return False, ~hidden.view(-1, self.num_heads if hidden.dim() == 3 else 1, n, m)

    def _softmax(
        self,
        form: Softmax,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        causal: bool,
        seen: Tensor | None,
        record: dict[str, Any] | None,
    ) -> Tensor:
        """Softmax under any mask, for self-attention and cross attention."""
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
        """The weight of the projection ``name``: (embed_dim, width of its input)."""
        if name == "out":
            return self.out_proj.weight
        if not self._joint:
            return {"query": self.q_proj_weight, "key": self.k_proj_weight, "value": self.v_proj_weight}[name]
        return self.in_proj_weight[self._rows(name)]

    def _project(self, name: str, x: Tensor) -> Tensor:
        """Apply the projection ``name``, one of query, key, value and out."""
        if name == "out":
            return self.out_proj(x)
        if x.shape[-1] == self.kdim + self.vdim and name != "query":
            x = x[..., : self.kdim] if name == "key" else x[..., self.kdim :]
        bias = self.in_proj_bias
        if bias is not None:  # pyright: ignore[reportUnnecessaryComparison]  # the stubs lack None
            bias = bias[self._rows(name)]
        return F.linear(x, self._weight(name), bias)

    def _rows(self, name: str) -> slice:
        first = PROJECTIONS.index(name) * self.embed_dim
        return slice(first, first + self.embed_dim)


class _Projection(nn.Module):
    """A projection of a mechanism that uses the weights of the module around it."""

    def __init__(self, owner: MultiheadAttention, name: str):
        super().__init__()
        # In a tuple, since a module as an attribute would become a child.
        self.owner, self.name, self.out_features = (owner,), name, owner.embed_dim

    @property
    def weight(self) -> Tensor:
        return self.owner[0]._weight(self.name)

    def forward(self, x: Tensor) -> Tensor:
        return self.owner[0]._project(self.name, x)

    def extra_repr(self) -> str:
        return self.name


def _forms(spec: str, dim: int, heads: int) -> dict[bool, Attention]:
    """The existing forms of a mechanism, by whether they are causal; they share their parameters."""
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
    if reason := _unfit(first):
        raise ValueError(f"attention={spec!r} does not fit nn.MultiheadAttention: {reason}; {_hint(first)}")
    for other in others:
        # Share the dictionaries, so that replacing a parameter or a module replaces it in both forms.
        other.__dict__.update(_parameters=first._parameters, _buffers=first._buffers, _modules=first._modules)
    return forms


def _hidden(name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    """Convert a mask of torch to bool, True where it hides. Raises ValueError for another shape or a bias."""
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must be {' or '.join(map(str, shapes))}, not {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be bool, True where it hides, or floating-point 0 and -inf, not {mask.dtype}")
    hidden = mask == -torch.inf
    plain = (hidden | (mask == 0)).all()
    message = f"{name} must contain only 0 and -inf; for a bias use a mechanism that has one, such as alibi"
    if torch.compiler.is_compiling():
        torch._assert_async(plain, message)  # pyright: ignore[reportPrivateImportUsage]  # no public equivalent
    elif not plain:
        raise ValueError(message)
    return hidden


def _unfit(form: Any) -> str:
    """Return why the projections of a mechanism are not those of ``nn.MultiheadAttention``, or ""."""
    dim = form.dim
    for name in PROJECTIONS:
        part = getattr(form, name, None)
        if not isinstance(part, nn.Linear) or (part.in_features, part.out_features) != (dim, dim):
            found = f"one of {part.in_features} x {part.out_features}" if isinstance(part, nn.Linear) else "none"
            return f"it needs a {name} projection of {dim} x {dim}, but has {found}"
    return ""


def _hint(form: Attention) -> str:
    """Return what to use in place of a mechanism that does not fit: the fewest options with which it does, or build."""
    square = {
        "expand_k": 1.0,
        "expand_v": 1.0,
        "key_heads": form.heads,
        "kv_heads": form.heads,
        "channels": form.dim // form.heads,
    }
    defaults = {name: option.default for name, option in own_options(type(form)).items()}
    given = {name: getattr(form, name) for name in defaults}
    known = [name for name in square if name in given]
    for count in range(1, len(known) + 1):
        for names in itertools.combinations(known, count):
            options = given | {name: square[name] for name in names}
            changed = ", ".join(f"{name}={value!r}" for name, value in options.items() if value != defaults[name])
            text = f"{form.name}({changed})" if changed else form.name
            try:
                if not _unfit(
                    model_memory.shapes(functools.partial(build, text, form.dim, form.heads, causal=form.causal))
                ):
                    return f"attention={text!r} fits"
            except ValueError:
                continue
    call = f"longspan.build({form.spec!r}, {form.dim}, {form.heads}, causal={form.causal})"
    return f"{call} returns it with its own projections; call it as y, state = attention(x)"
