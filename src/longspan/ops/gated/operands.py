"""The operands of the recurrence, as one value that every form takes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Required, TypedDict

import torch.nn.functional as F
from torch import Tensor

from ..._utils.spec import known
from ..arguments import CallOptions, StateOptions, check_operands, misfit
from ..forms import Forms, serve, step
from ..isolated import Packed, Part, isolated
from ..native.call import LARGEST
from ..operands import check_donation, exporting, zero_masked
from ..packed import by_sequence, count_states, one_token
from ..tensors import per_root, unit, upcast_half, wide_dtype
from .decays import LOWEST

NORMS = {"l2": "divide by the root of the sum of squares plus 1e-6"}
SHAPES = {
    "query": "B G N D",
    "key": "B G N D",
    "value": "B H N E",
    "read": "B G N D",
    "erase": "B G N D",
    "log_decay": "B H N | B H N D",
    "beta": "B H N",
    "mask": "B N",
    "state": "B H D E",
}


class Scaled(TypedDict, total=False):
    """Keyword arguments that treat queries and keys."""

    scale: float | None
    normalize: str | None


class DecayOptions(CallOptions, Scaled, total=False):
    """Keyword arguments of ``decay_attention``."""

    log_decay: Required[Tensor]


class DeltaOptions(CallOptions, Scaled, total=False):
    """Keyword arguments of ``delta_rule``."""

    beta: Required[Tensor]
    log_decay: Tensor | None


class RecurrenceOptions(StateOptions, Scaled, total=False):
    """Keyword arguments of ``gated.recur``."""

    log_decay: Tensor | None
    beta: Tensor | None


class GeneralRecurrenceOptions(StateOptions, total=False):
    """Keyword arguments of ``general.recur``."""

    read: Required[Tensor]
    erase: Required[Tensor]
    log_decay: Tensor | None
    scale: float | None
    read_before_decay: bool


class GeneralOptions(GeneralRecurrenceOptions, CallOptions, total=False):
    """Keyword arguments of ``general_delta_rule``."""


class Recurrence(NamedTuple):
    """Operands of ``decay_attention`` and ``delta_rule``, for H value heads and G heads of queries and keys."""

    q: Tensor  # (B,G,N,D)
    k: Tensor  # (B,G,N,D)
    v: Tensor  # (B,H,N,E)
    log_decay: Tensor | None  # (B,H,N) or (B,H,N,D)
    beta: Tensor | None  # (B,H,N)
    state: Tensor  # (B,H,D,E), a row per sequence with cu_seqlens
    mask: Tensor | None = None  # (B,N)
    segments: Tensor | None = None  # (B,N)
    cu_seqlens: Tensor | None = None  # (S+1,)
    scale: float = 1.0
    normalize: bool = False  # divide q and k by their norms

    # The operands with tokens, their axis, and the one in whose shape the output is.
    TOKENS = ("q", "k", "v", "log_decay", "beta")
    AXIS, OUTPUT = 2, "v"
    token = property(one_token)

    @property
    def op(self) -> str:
        """What the operands compute, for messages."""
        if self.beta is not None:
            return "the delta rule"
        return "a running sum of outer products" if self.log_decay is None else "decay attention"


class GeneralRecurrence(NamedTuple):
    """Operands of ``general_delta_rule``; shapes as in ``Recurrence``, read and erase as k."""

    q: Tensor
    k: Tensor
    v: Tensor
    read: Tensor
    erase: Tensor
    log_decay: Tensor | None
    state: Tensor
    mask: Tensor | None = None
    segments: Tensor | None = None
    cu_seqlens: Tensor | None = None
    scale: float = 1.0
    early: bool = False  # read the state before its decay

    TOKENS = ("q", "k", "v", "read", "erase", "log_decay")
    AXIS, OUTPUT = 2, "v"
    op = "the general delta rule"
    token = property(one_token)


def check(normalize: str | None = None, **given: Any) -> None:
    """Raise ValueError unless the arguments of a recurrence fit each other; names as in the public functions."""
    if normalize is not None:
        known(normalize, NORMS, "norm of queries and keys")
    sizes = check_operands(SHAPES, "value", **given)
    if sizes["H"] % (sizes["G"] or sizes["H"] + 1):
        raise misfit(SHAPES, given, ", where G divides H")


def first_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the state (B,H,D,E) before the first token, zeros."""
    return v.new_zeros(count_states(v, cu_seqlens), v.shape[1], q.shape[-1], v.shape[-1], dtype=wide_dtype(v))


def scale_of(q: Any, scale: float | None) -> float:
    """Return the scale of a call, by default that of the keys; anything for operands that ``check`` refuses."""
    if scale is not None:
        return scale
    return per_root(q.shape[-1]) if isinstance(q, Tensor) and q.dim() else 1.0


def with_state(r: Any) -> Any:
    """Return operands with a state: zeros where they have none."""
    return r if r.state is not None else r._replace(state=first_state(r.q, r.v, r.cu_seqlens))


def call(
    forms: Forms, r: Any, vectors: dict[str, Any], donate: bool, normalize: str | None = None
) -> tuple[Tensor, Tensor]:
    """Check the arguments of a public function, and compute them by the fastest form.

    Args:
        forms: The forms of the family.
        r: The operands, unchecked; the state may be None.
        vectors: Those with tokens, by the names of the public function.
        donate: Allows the call to overwrite the state.
        normalize: How queries and keys are normalized.
    """
    state, declined = r.state, False
    if state is not None:
        if donate:
            check_donation(state, **vectors)
        plain = r.mask is None and r.segments is None and r.cu_seqlens is None
        # Fast path for one-token decoding, which validates its own shapes.
        if plain and normalize in (None, "l2") and isinstance(r.q, Tensor) and isinstance(r.v, Tensor):
            if (found := step(forms, r, donate)) is not None:
                return found
            declined = True
    check(normalize, **vectors, mask=r.mask, segments=r.segments, cu_seqlens=r.cu_seqlens, state=state)
    return isolated_call(partial(serve_with_keys, forms, declined=declined), with_state(r), donate)


def serve_with_keys(forms: Forms, r: Any, donate: bool = False, declined: bool = False) -> tuple[Tensor, Tensor]:
    """``forms.serve`` for any number of key channels: D = 0 equals one channel of zeros, which every form can take."""
    if r.q.shape[-1] or exporting():
        return serve(forms, r, donate, declined)
    vectors = {name: getattr(r, name) for name in r.TOKENS if name != "v"}
    padded = {name: F.pad(t, (0, 1)) for name, t in vectors.items() if t is not None and t.dim() == 4}
    out, end = serve(forms, r._replace(**padded, state=F.pad(r.state, (0, 0, 0, 1))))
    return out, end[:, :, :0]


def step_sizes(r: Any, by_value: bool = False) -> tuple[int, int, int, int, int] | None:
    """Return B, G, H, D and E if the operands are one token that the steps of the kernels take, else None.

    ``by_value``: log decays are those of the channels of the values. It runs once per token and layer, before the
    operands are checked.
    """
    q, v = r.q, r.v
    if not q.dim() == v.dim() == 4:
        return None
    batch, groups, tokens, keys = shape = q.shape
    _, heads, _, values = v.shape
    if tokens != 1 or not batch * groups or heads % groups or not (0 < keys <= LARGEST and 0 < values <= LARGEST):
        return None
    if r.k.shape != shape or v.shape != (batch, heads, 1, values) or r.state.shape != (batch, heads, keys, values):
        return None
    decay = r.log_decay
    if decay is not None and decay.shape not in (
        ((batch, heads, 1, values),) if by_value else ((batch, heads, 1), (batch, heads, 1, keys))
    ):
        return None
    return batch, groups, heads, keys, values


def masked(r: Any) -> Any:
    """Return the operands with zeros at masked tokens."""
    found = zero_masked(r.mask, *(getattr(r, name) for name in r.TOKENS))
    return r._replace(**dict(zip(r.TOKENS, found, strict=True)))


def prepared(form: Callable[[Any], tuple[Tensor, Tensor]], r: Recurrence) -> tuple[Tensor, Tensor]:
    """Call ``form``, which handles neither ``normalize`` nor ``cu_seqlens``; the kernels do both inside."""
    if r.normalize:
        # Masked tokens are zeroed before the root. In float32 at least, as in the kernels.
        q, k = (unit(upcast_half(t)) for t in zero_masked(r.mask, r.q, r.k))
        r = r._replace(q=q, k=k, normalize=False)
    return by_sequence(form, r)


def isolated_call(run: Callable[[Any, bool], tuple[Tensor, Tensor]], r: Any, donate: bool) -> tuple[Tensor, Tensor]:
    """Return ``run(r, donate)`` with NaN and infinity confined to the packed sequence that holds them."""
    if r.segments is None:
        return run(r, donate)
    # Masked tokens are not examined, and -inf is a valid log decay.
    r = masked(r)

    def part_of(tokens: Sequence[Any], state: Any, carry: Any, part: Part | None) -> tuple[Tensor, Tensor]:
        own = r._replace(**dict(zip(r.TOKENS, tokens, strict=True)), state=state)
        return run(own if part is None else own._replace(mask=part.cut(r.mask), segments=None), False)

    tokens = [getattr(r, name) for name in r.TOKENS]
    finite = None if r.log_decay is None else r.log_decay.clamp(min=LOWEST)
    examined = [finite if name == "log_decay" else t for name, t in zip(r.TOKENS, tokens, strict=True)]
    packed = Packed(part_of, r.segments, 2, lambda: r.state.new_zeros(1, *r.state.shape[1:]))
    out, after = isolated(packed, tokens, r.state, examined=examined)
    return out, after
