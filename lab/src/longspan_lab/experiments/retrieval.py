"""Associative retrieval: one layer of attention with a fixed state returns the value of a key."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan._utils.spec import known
from longspan.ops import gated
from longspan.ops.gated.general import general_delta_rule
from longspan.ops.linear import polynomial, random_features
from longspan.ops.linear.features import dpfp, elu, sum_normalize

RULES = {
    "sum": "adds what a token brings, and divides by the sum of weights",
    "delta": "replaces what a key has stored",
    "gated": "adds with an input and a forget gate per token, as mLSTM does",
    "levels": "adds in sums over stretches of 1, 2, 4, ... tokens, which a query weights, as log-linear attention does",
    "general": "erases and decays each channel at a rate of the token, without a feature map, as RWKV-7 does",
    "regression": "solves the ridge regression from keys to values, with a weight per token, as MesaNet does",
}
BASIC = ("sum", "delta")
EPS = 1e-6


class Kind(NamedTuple):
    """Replacement of the softmax kernel."""

    about: str
    capacity: Callable[[int], int] | None = None  # key channels -> features; None: no finite number
    features: Callable[[Tensor], Tensor] | None = None
    rows: int = 0  # random rows, each used in both directions
    kept: bool = False  # the rows are drawn once, and inputs scaled, instead of neither


def _dpfp(nu: int) -> Kind:
    return Kind(f"DPFP with nu = {nu}: 2 D {nu} features", lambda size: 2 * size * nu, lambda x: dpfp(x, nu))


def _favor(rows: int, kept: bool) -> Kind:
    how = "drawn once" if kept else "drawn anew in every call, with unscaled inputs and no shift, as published"
    return Kind(f"FAVOR+ with {rows} rows {how}", lambda size: 2 * rows, rows=rows, kept=kept)


ENCODERS = {
    "linear": Kind("elu + 1: D features", lambda size: size, elu),
    "dpfp1": _dpfp(1),
    "dpfp2": _dpfp(2),
    "dpfp3": _dpfp(3),
    "favor64": _favor(64, kept=False),
    "favor128": _favor(128, kept=False),
    "favor512": _favor(512, kept=False),
    "favor64-kept": _favor(64, kept=True),
    "favor128-kept": _favor(128, kept=True),
    "favor512-kept": _favor(512, kept=True),
    "softmax": Kind("softmax attention, which keeps every key"),
    "power2": Kind(
        "products of two channels, as power attention of degree 2 has them: D (D + 1) / 2 features",
        lambda size: size * (size + 1) // 2,
        lambda x: polynomial.power(x.shape[-1], 2, EPS).features(x),
    ),
}


class Sequences(NamedTuple):
    """Symbols of keys and of values, each (B,L), in 0 ... S - 1."""

    keys: Tensor
    values: Tensor


def draw(count: int, length: int, symbols: int, replace: bool, generator: torch.Generator) -> Sequences:
    """Random sequences. Without replacement, no key and no value comes twice, so that the length is S at most."""
    if replace:
        return Sequences(*torch.randint(symbols, (2, count, length), generator=generator))
    return Sequences(*torch.rand(2, count, symbols, generator=generator).argsort(-1)[..., :length])


def answers(sequences: Sequences, symbols: int) -> Tensor:
    """The last value of each key, -1 for absent keys: (B,S)."""
    at = torch.arange(sequences.keys.shape[1]).expand_as(sequences.keys)
    last = torch.full((len(at), symbols), -1).scatter_reduce(1, sequences.keys, at, "amax")
    return sequences.values.gather(1, last.clamp(min=0)).where(last >= 0, -1)


class Retriever(nn.Module):
    """One layer of attention from every key symbol to the tokens (key, value) of a sequence.

    Keys have a learned embedding of int(2.2 S) channels, values are one-hot. A token's attention key is a projection of
    both; a query is one of the key's embedding alone; the attention's values are the one-hot values themselves.
    ``kind``: a name in ENCODERS; ``rule``: one in RULES. Step sizes, gates and directions are projections of a token.

    Source: Schlag et al. 2021 (2102.11174), section 6.1, and the code of CAPACITY_SOURCE, without its biases, which the
    embedding can stand in for. Other rules: Beck et al. 2024 (2405.04517), Guo et al. 2025 (2506.04761), Peng et al.
    2025 (2503.14456), von Oswald et al. 2025 (2506.05233). Raises ValueError for unknown names, for the delta rule of a
    kind that has no fixed feature map, and for rules other than sum and delta of a kind other than linear.
    """

    def __init__(self, symbols: int, size: int, kind: str, rule: str, generator: torch.Generator):
        super().__init__()
        self.kind, self.size, self.symbols = ENCODERS[known(kind, ENCODERS, "kind")], size, symbols
        self.delta = known(rule, RULES, "rule") == "delta"
        if self.delta and self.kind.features is None:
            raise ValueError(f"the delta rule needs a fixed feature map, which {kind} has not")
        if rule not in BASIC and kind != "linear":
            raise ValueError(f"rule={rule} is for the kind linear, not {kind}")
        width = int(2.2 * symbols)

        def uniform(rows: int, columns: int, bound: float) -> nn.Parameter:
            return nn.Parameter((2 * torch.rand(rows, columns, generator=generator) - 1) * bound)

        self.embedding = nn.Parameter(torch.randn(symbols, width, generator=generator))
        self.query, self.key, self.key_of_value = (uniform(n, size, size**-0.5) for n in (width, width, symbols))
        self.rate, self.rate_of_value = (uniform(n, 1, (width + symbols) ** -0.5) for n in (width, symbols))
        self.rows = self._draw(generator) if self.kind.kept else None
        self.rule, self.more = rule, nn.ParameterDict()
        # An input and a forget gate; how much of each channel is erased, and how fast it decays.
        for name, columns in {"gated": {"gate": 2}, "general": dict.fromkeys(("rate", "decay"), size)}.get(
            rule, {}
        ).items():
            self.more[name] = uniform(width, columns, width**-0.5)
            self.more[f"{name}_of_value"] = uniform(symbols, columns, size**-0.5)
        if rule == "general":
            self.more["direction"], self.more["part"] = (nn.Parameter(torch.ones(size)) for _ in range(2))
        if rule == "regression":
            self.more["ridge"] = nn.Parameter(torch.full((size,), 0.75).expm1().log())  # 1 at first, at least 0.25
        if rule == "levels":
            self.more["level"] = uniform(width, 32, width**-0.5)

    def forward(self, sequences: Sequences, generator: torch.Generator) -> Tensor:
        """Output of the attention for every key symbol (B,S,S). ``generator``: for rows drawn per call."""
        queries = (self.embedding @ self.query)[None]
        keys = (self.embedding @ self.key)[sequences.keys] + self.key_of_value[sequences.values]  # (B,L,D)
        if self.delta:
            return self._corrected(queries, keys, sequences)
        if self.rule == "general":
            return self._erased(queries, keys, sequences)
        if self.rule == "regression":
            return self._regressed(queries, keys, sequences)
        weights = self._weights(queries, keys, generator)  # (B,S,L)
        if self.rule in ("gated", "levels"):
            factors = self._gates(sequences) if self.rule == "gated" else self._level_weights(keys.shape[1])
            weights = _normalized(weights * factors)
        at = sequences.values[:, None].expand_as(weights)
        return weights.new_zeros(len(at), self.symbols, self.symbols).scatter_add(2, at, weights)

    def loss(self, sequences: Sequences, generator: torch.Generator) -> Tensor:
        """Half the squared error, averaged over the keys of the sequence: 0.5 for an output of zeros."""
        right = answers(sequences, self.symbols)
        found, came = self(sequences, generator), right >= 0
        hit = found.gather(2, right.clamp(min=0)[..., None])[..., 0]
        # |found - onehot|^2, without the one-hot vectors.
        error = found.square().sum(-1) - 2 * hit + 1
        return error[came].mean() / 2

    def _weights(self, queries: Tensor, keys: Tensor, generator: torch.Generator) -> Tensor:
        if self.kind.rows:
            rows = self._draw(generator) if self.rows is None else self.rows
            scale = self.size**-0.25 if self.kind.kept else 1.0
            q, k = (random_features.hyperbolic(scale * x, rows) for x in (queries, keys))
            if not self.kind.kept:
                # Without shifts, as published, EPS makes unlikely answers smaller. Weights far below it
                # would have denormal gradients, which are slow.
                weights = _floored(q, -40.0).features() @ _floored(k, -40.0).features().mT
                return _normalized(F.threshold(weights, 1e-9 * EPS, 0.0))
            # Both shifts cancel in the ratio, up to EPS.
            top = k.peak().amax(-1, keepdim=True)
            phi_q, phi_k = _floored(q, -25.0, q.peak()).features(), _floored(k, -25.0, top).features()
        elif self.kind.features is None:
            return (queries @ keys.mT * self.size**-0.5).softmax(-1)
        else:
            phi_q, phi_k = self.kind.features(queries), self.kind.features(keys)
        return _normalized(phi_q @ phi_k.mT)

    def _corrected(self, queries: Tensor, keys: Tensor, sequences: Sequences) -> Tensor:
        assert self.kind.features is not None
        phi_q, phi_k = (sum_normalize(self.kind.features(x)) for x in (queries, keys))
        values = F.one_hot(sequences.values, self.symbols).to(keys)
        # Outputs of the tokens are not used; the queries come after the last.
        _, state = gated.recur(
            phi_k[:, None], phi_k[:, None], values[:, None], beta=self._rate(sequences).mT, scale=1.0
        )
        return phi_q @ state[:, 0]

    def _regressed(self, queries: Tensor, keys: Tensor, sequences: Sequences) -> Tensor:
        q, k = F.normalize(queries, dim=-1), F.normalize(keys, dim=-1)
        written = (k * self._rate(sequences)).mT  # (B,D,L)
        ridge = (F.softplus(self.more["ridge"]) + 0.25).diag()
        return q @ torch.linalg.solve(written @ k + ridge, written @ F.one_hot(sequences.values, self.symbols).to(k))

    def _rate(self, sequences: Sequences) -> Tensor:
        """The step size of each token (B,L,1), in 0 ... 1."""
        return ((self.embedding @ self.rate)[sequences.keys] + self.rate_of_value[sequences.values]).sigmoid()

    def _of_token(self, name: str, sequences: Sequences) -> Tensor:
        """A projection of each token (B,L,channels)."""
        of_key = (self.embedding @ self.more[name])[sequences.keys]
        return of_key + self.more[f"{name}_of_value"][sequences.values]

    def _gates(self, sequences: Sequences) -> Tensor:
        """What the gates leave of each token at the end (B,1,L), relative to the largest."""
        enter, forget = self._of_token("gate", sequences).unbind(-1)
        kept = F.logsigmoid(forget)
        later = kept.flip(1).cumsum(1).flip(1) - kept
        exponent = enter + later
        return (exponent - exponent.amax(1, keepdim=True)).exp()[:, None]

    def _level_weights(self, length: int) -> Tensor:
        """The weight that each query gives to the stretch of each token (1,S,L)."""
        of_level = F.softplus(self.embedding @ self.more["level"])
        return of_level[:, levels(length)][None]

    def _erased(self, queries: Tensor, keys: Tensor, sequences: Sequences) -> Tensor:
        values = F.one_hot(sequences.values, self.symbols).to(keys)
        rate = self._of_token("rate", sequences).sigmoid()
        decay = -math.exp(-0.5) * (self._of_token("decay", sequences) - 6).sigmoid()  # slow at first
        read = F.normalize(keys * self.more["direction"], dim=-1)
        write = F.normalize(keys, dim=-1) * (1 + (rate - 1) * self.more["part"])
        operands = [t[:, None] for t in (write, write, values)]
        _, state = general_delta_rule(
            *operands,
            read=read[:, None],
            erase=(read * rate)[:, None],
            log_decay=decay[:, None],
            read_before_decay=True,
            scale=1.0,
            return_state=True,
        )
        return F.normalize(queries, dim=-1) @ state[:, 0]

    def _draw(self, generator: torch.Generator) -> Tensor:
        kind = {"rows": "orthogonal", "radii": "chi", "generator": generator}
        return random_features.sample(1, self.kind.rows, self.size, **kind)[0].float()


def levels(length: int) -> Tensor:
    """The level of each token (L,) at the end of a sequence: its length as a sum of powers of two, the largest first.

    >>> levels(7).tolist()
    [2, 2, 2, 2, 1, 1, 0]
    """
    powers = [bit for bit in reversed(range(length.bit_length())) if length >> bit & 1]
    return torch.cat([torch.full((1 << bit,), bit) for bit in powers])


def _normalized(weights: Tensor) -> Tensor:
    return weights / (weights.sum(-1, keepdim=True) + EPS)


def _floored(parts: random_features.Parts, lowest: float, shift: Tensor | None = None) -> random_features.Parts:
    """With exponents less ``shift``, and none below ``lowest``: smaller features vanish next to EPS."""
    exponent = parts.exponent
    assert exponent is not None
    return parts._replace(exponent=(exponent if shift is None else exponent - shift[..., None]).clamp(min=lowest))
