"""RWKV-7 (Peng et al. 2025, 2503.14456): a state that erases along one vector and writes along another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....modules.token_shift import shift, shift_start
from .....ops.gated import general
from .....ops.tensors import unit, upcast_half
from ..family import Family
from ..mixer import Call, Mixer, heads
from ..rwkv import OPTIONS, LoRA, RwkvBlock, RwkvBody, RwkvState, feed_forward_width, group_norm, squared_relu
from ..rwkv_files import split_mixes

HIDDEN_RATIO = 4
SLOWEST = -0.6065306597126334  # -e^(-1/2), the log decay that bounds all others from below
MIXES = ("r", "w", "k", "v", "a", "g")


class Rwkv7State(NamedTuple):
    """The sums, and the last input."""

    sums: Tensor  # (B,H,D,E)
    last: Tensor  # (B,1,hidden)


class Rwkv7(Mixer):
    """S = Diag(e^g) S - (kk * a) (kk^T S) + k v^T, o = S^T r, and a bonus for the token itself.

    Group norm and a gate. Layers after the first mix their values with those of the first.
    """

    def __init__(self, config: Any, layer: int):
        super().__init__()
        hidden, self.layer, self.fused = config.hidden_size, layer, config.fuse_norm
        self.heads, size = head_sizes(config)
        values = value_width(config)
        self.sizes = size, values // self.heads
        for name in MIXES:
            self.register_parameter(f"x_{name}", nn.Parameter(torch.zeros(1, 1, hidden)))
        self.k_k, self.k_a = (nn.Parameter(torch.zeros(hidden)) for _ in range(2))
        self.r_k = nn.Parameter(torch.zeros(self.heads, size))
        self.r_proj, self.k_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.o_proj = nn.Linear(values, hidden, bias=False)
        self.w_lora = LoRA(hidden, hidden, config.decay_low_rank_dim, nn.Tanh())
        self.v_lora = LoRA(hidden, values, config.v_low_rank_dim, nn.Identity()) if layer else None
        self.a_lora = LoRA(hidden, hidden, config.a_low_rank_dim, nn.Identity())
        self.g_lora = LoRA(hidden, values, config.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        self.g_norm = nn.GroupNorm(self.heads, values, size * config.norm_eps)

    def start(self, batch: int) -> Rwkv7State:
        sums = upcast_half(self.k_k.new_zeros(batch, self.heads, *self.sizes))
        return Rwkv7State(sums, shift_start(self.k_k, batch, len(self.k_k)))

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (a wider signature)
        self, x: Tensor, state: Rwkv7State | None, call: Call, first: Tensor | None
    ) -> tuple[Tensor, Rwkv7State | None, Tensor | None]:
        """As in ``Mixer``; takes and returns also the values of the first layer (B,N,HE), None in that layer."""
        sums, last = self.start(len(x)) if state is None else state
        before, last = shift(x, last, **call.packing)
        delta = before - x
        xr, xw, xk, xv, xa, xg = (torch.addcmul(x, delta, self.get_parameter(f"x_{name}")) for name in MIXES)
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        if first is not None and self.v_lora is not None:
            v = torch.lerp(v, first, self.v_lora(xv).sigmoid())
        else:
            first = v
        decay = SLOWEST * upcast_half(self.w_lora(xw)).sigmoid()
        a = self.a_lora(xa).sigmoid()
        kk = self.unit(heads(k * self.k_k, self.sizes[0]))
        k = torch.addcmul(k, k * (a - 1), self.k_a)
        r, k, decay, a = (heads(t, self.sizes[0]) for t in (r, k, decay, a))
        v = heads(v, self.sizes[1])
        o, sums = general.recur(
            r,
            k,
            v,
            read=kk,
            erase=kk * a,
            log_decay=decay,
            scale=1.0,
            read_before_decay=True,
            state=sums,
            **call.packing,
        )
        bonus = (r * k * self.r_k[:, None]).sum(-1, keepdim=True) * v
        y = (group_norm(o, self.g_norm) + bonus.transpose(1, 2).flatten(-2)) * self.g_lora(xg)
        return self.o_proj(y), None if state is None else Rwkv7State(sums, last), first

    slowest = SLOWEST

    @property
    def least(self) -> float:
        """What is added to a squared length."""
        return 1e-6 if self.fused else 1e-24

    def unit(self, k: Tensor) -> Tensor:
        """Divide k (...,D) by its length; the original's two forms differ in what they add to it."""
        return unit(k, self.least) if self.fused else F.normalize(upcast_half(k), dim=-1, eps=1e-12).to(k.dtype)


class FeedForward(nn.Module):
    """W_v max(W_k x_k, 0)^2, where x_k is a mix of the token and the one before."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.x_k = nn.Parameter(torch.zeros(hidden))
        self.key = nn.Linear(hidden, width, bias=False)
        self.value = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, delta: Tensor) -> Tensor:
        """x, delta (B,N,hidden) -> (B,N,hidden)."""
        return self.value(squared_relu(self.key(torch.addcmul(x, delta, self.x_k))))


class Rwkv7Block(RwkvBlock):
    """A block that passes the values of the first layer on."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (a wider signature)
        self, x: Tensor, state: RwkvState | None, call: Call, first: Tensor | None
    ) -> tuple[Tensor, RwkvState | None, Tensor | None]:
        """x (B,N,hidden) -> (B,N,hidden), the next state, the values of the first layer (B,N,HE)."""
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        y, after, first = self.attn(self.attn_norm(x), None if state is None else state.mixer, call, first)
        x, last = self.feed(x + y, state, call)
        return x, None if state is None else RwkvState(after, last), first


class Rwkv7Body(RwkvBody):
    """A body that passes the values of the first layer on.

    They are arguments and results of the blocks, so that gradients reach them through checkpointed blocks too.
    """

    def forward(self, x: Tensor, states: list[Any] | None, call: Call) -> tuple[Tensor, list[Any]]:
        after, first = [], None
        for i, layer in enumerate(self.layers):
            x, state, first = layer(x, None if states is None else states[i], call, first)
            after.append(state)
        return self.norm(x), after


def head_sizes(config: Any) -> tuple[int, int]:
    """Return the number of heads and their channels of keys; ``head_dim`` takes precedence over ``num_heads``."""
    if config.head_dim is not None:
        return config.hidden_size // config.head_dim, config.head_dim
    return config.num_heads, config.hidden_size // config.num_heads


def value_width(config: Any) -> int:
    """Return the channels of the values of all heads, the same in all layers."""
    given = config.value_dim
    return (given[0] if isinstance(given, list | tuple) else given) or config.hidden_size


def _block(config: Any, layer: int, mixer: Callable[[Any, int], Any]) -> RwkvBlock:
    ffn = FeedForward(config.hidden_size, feed_forward_width(config, HIDDEN_RATIO))
    return Rwkv7Block(config, layer, mixer(config, layer), ffn)


def _check(config: Any) -> str:
    hidden, given = config.hidden_size, config.value_dim
    if config.attn is not None:
        return f"attn={config.attn!r} must be null: every layer mixes in the values of the first"
    if config.head_dim is None and config.num_heads is None:
        return "one of head_dim and num_heads must be given"
    count, size = head_sizes(config)
    if not count or count * size != hidden:
        return f"hidden_size={hidden} does not divide into {count} heads of {size} channels"
    widths = given if isinstance(given, list | tuple) else [given or hidden]
    if isinstance(given, list | tuple) and len(widths) != config.num_hidden_layers:
        return f"value_dim has {len(widths)} entries for num_hidden_layers={config.num_hidden_layers}"
    if odd := [width for width in widths if width != widths[0]]:
        return f"value_dim has both {widths[0]} and {odd[0]}: every layer mixes in the values of the first"
    if widths and widths[0] % count:
        return f"value_dim={widths[0]} is not a multiple of {count} heads"
    if not config.elementwise_affine:
        return "elementwise_affine must be true: the norms have weights"
    return ""


FAMILIES = (
    Family(
        "rwkv7",
        "RWKV7",
        Rwkv7,
        options={
            **OPTIONS,
            "hidden_ratio": HIDDEN_RATIO,
            "head_dim": 64,
            "num_heads": None,
            "value_dim": None,
            "decay_low_rank_dim": 64,
            "gate_low_rank_dim": 128,
            "a_low_rank_dim": 64,
            "v_low_rank_dim": 16,
            "fuse_norm": True,
        },
        check=_check,
        body=Rwkv7Body,
        block=_block,
        migrate=split_mixes,
    ),
)
