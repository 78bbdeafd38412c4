"""State adapters: the initial states of recurrent layers as trainable parameters, with all weights as they are.

References:
    S0 tuning, arXiv 2604.01168: the initial state of each recurrent layer is all that is trained.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import states
from .attention.validation import check_tokens
from .compat.servable import ForeignModel, servable
from .models.decoder import Decoder, DecoderState
from .models.stacks.universal import UniversalState
from .ops.segments import numbered
from .ops.tensors import positions, upcast_half
from .states.utils import named

KIND = "initial-states"
# Fields of a config that change neither the sizes nor the outputs in evaluation mode, but for those of few bits.
UNCOMPUTED = ("dropout", "checkpointing", "feedforward_chunk", "quantization_config", "use_cache")


@dataclass(frozen=True, eq=False)
class FrozenStates:
    """The values of an adapter, from which a pool starts streams."""

    state: DecoderState
    """one row, before the start token"""
    sha256: str
    """of these values: adapters with the same values share cached prefixes, others never do"""
    name: str = ""
    """by which sessions know the adapter"""

    @property
    def key(self) -> str:
        """What a session keeps of its adapter: its name and its sha256."""
        return f"{self.name}@{self.sha256}"


class InitialStates(nn.Module):
    """The initial states of the recurrent layers of a model, as parameters.

    They begin with the values of the model, so that an untrained adapter changes nothing. The parameters of layer ``i``
    are those of ``layers[i]``, by the name of the field of its state, without the dimension of rows, in float32 at
    least. The model is not a submodule: ``parameters()`` has the states alone.

    Args:
        model: A ``Decoder``, a ``LongspanForCausalLM``, whose decoder it takes, a model of
            ``longspan.compat.fla.load``, or one of transformers under ``longspan.compat.transformers.accelerate()``.
            Its weights are left as they are; ``model.requires_grad_(False)`` saves their gradients.

    Raises:
        ValueError: For a model of another kind, and one without a recurrent state to train.
    """

    model: Any

    def __init__(self, model: Any):
        super().__init__()
        model = servable(model)
        if not isinstance(model, Decoder | ForeignModel):
            raise ValueError(
                f"state adapters need a longspan.Decoder, or a model of transformers or flash-linear-attention, not "
                f"{type(model).__name__}"
            )
        object.__setattr__(self, "model", model)  # not a submodule
        state = model.init_state(1)
        self.layers = nn.ModuleList(nn.Module() for _ in _layers(state))
        # The parameter by the place of its leaf in a flat state.
        self._places: dict[int, str] = {}
        for place, number, name, t in _learned(model, state):
            self.layers[number].register_parameter(name, nn.Parameter(upcast_half(t[0].detach()).clone()))
            self._places[place] = f"layers.{number}.{name}"
        if not self._places:
            kinds = [one.spec for one in model.stack.attentions()] if isinstance(model, Decoder) else [model.kind]
            names = ", ".join(dict.fromkeys(kinds))
            raise ValueError(
                f"the state of {names} has no sums to train: it keeps tokens, or is relative to earlier ones; state "
                "adapters need a recurrent layer such as linear, gla or gated_deltanet"
            )

    def states(self, batch: int, capacity: int | None = None) -> DecoderState:
        """Return the state of the model before the start token, through which gradients reach the parameters.

        Args:
            batch: Number of rows, B.
            capacity: Slots of KV caches, as in ``Decoder.init_state``.

        Returns:
            The state, which shares no memory with the parameters.
        """
        return self._filled(self.model.init_state(batch, capacity))

    def _filled(self, state: DecoderState) -> DecoderState:
        """Return a state with the values of the parameters, each in its dtype and with its layout in memory."""
        leaves, tree = pytree.tree_flatten(state)
        for place, name in self._places.items():
            leaves[place] = torch.empty_like(leaves[place]).copy_(self.get_parameter(name))
        return pytree.tree_unflatten(leaves, tree)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of the model for whole sequences that start from these states.

        Args:
            tokens: (B,N) int64, as for the model; ``shift`` of a decoder puts the start token in front.
            mask: (B,N) bool, True on real tokens; either side may be padded.
            segments: (B,N) int64, packed sequences: each starts from the learned states. They are read as rows of their
                own, padded to the longest one, because a packed row of recurrent states has one state only.
            targets: (B,N) int64. The result is then the log-probability of each in nats.

        Returns:
            Outputs (B,N,size), or log-probabilities (B,N).

        Raises:
            ValueError: For arguments that the model does not accept.
        """
        if segments is None or not tokens.numel():
            return self._read(tokens, mask, targets)
        given = {"segments": segments} | ({} if mask is None else {"mask": mask})
        ids = check_tokens(self.model, tokens, given)["segments"]
        number, place = numbered(ids), positions(tokens, segments=ids)[0]
        counts = number[:, -1] + 1
        row = number + (counts.cumsum(0) - counts)[:, None]
        rows, width = int(counts.sum()), int(place.max()) + 1

        def apart(values: Tensor) -> Tensor:
            return values.new_zeros(rows, width).index_put((row, place), values)

        real = apart(torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)
        more = None if targets is None else apart(targets)
        return self._read(apart(tokens), real, more)[row, place]

    def _read(self, tokens: Tensor, mask: Tensor | None, targets: Tensor | None) -> Tensor:
        state = self.states(len(tokens))
        if isinstance(self.model, ForeignModel):
            return self.model.read(tokens, state, mask=mask, targets=targets)
        return self.model(tokens, state, mask=mask, targets=targets)[0]

    def frozen(self, name: str = "") -> FrozenStates:
        """Return a copy of the present values, for ``Pool.submit``.

        Args:
            name: By which sessions know the adapter.

        Raises:
            ValueError: For values that are NaN or infinite.
        """
        with torch.no_grad():
            state, digest = self.states(1), hashlib.sha256()
            for field, t in self._finite():
                digest.update(f"{field} {t.dtype} {tuple(t.shape)}\n".encode())
                digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return FrozenStates(state, digest.hexdigest(), name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the adapter to one safetensors file, atomically: a state of one row, with the config of the model.

        Args:
            path: The file; an older one is replaced.

        Raises:
            ValueError: For values that are NaN or infinite, and a path that cannot be written.
        """
        self._finite()
        facts = {"adapter": KIND, "config": json.dumps(_config(self.model), default=str)}
        with torch.no_grad():
            states.save(self._filled(_wide(self.model.init_state(1))), path, facts)

    def _finite(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters by name. Raises ValueError for one that is NaN or infinite."""
        found = list(self.named_parameters())
        if odd := [name for name, t in found if not t.isfinite().all()]:
            raise ValueError(f"the initial states {', '.join(odd)} are NaN or infinite")
        return found


def initial_states(model: Any) -> InitialStates:
    """Make the initial states of all recurrent layers of a model trainable.

    Sums, fast weights and the last inputs of convolutions are trained. KV caches, windows of tokens and counters stay
    as they are; so do the layers that have nothing else.

    Args:
        model: As for ``InitialStates``.

    Returns:
        The states as parameters, with the values that the model has.

    Raises:
        ValueError: For a model of another kind, and one without a recurrent state to train.

    Example:
        >>> import torch, longspan
        >>> config = longspan.DecoderConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5, attention="gla; softmax")
        >>> model = longspan.Decoder(config).requires_grad_(False)
        >>> adapter = longspan.adapt.initial_states(model)
        >>> [name for name, _ in adapter.named_parameters()]
        ['layers.0.sums']
        >>> tokens = torch.tensor([[3, 1, 4, 1]])
        >>> (-adapter(model.shift(tokens), targets=tokens).mean()).backward()
        >>> adapter.layers[0].sums.grad.shape
        torch.Size([2, 2, 4])

    References:
        S0 tuning, arXiv 2604.01168.
    """
    return InitialStates(model)


def load(path: str | os.PathLike[str], model: Any) -> InitialStates:
    """Read an adapter that ``InitialStates.save`` has written.

    The config of the model must be that of the model for which the adapter was trained, except for dropout,
    checkpointing and chunks of the feed-forward network. Entries that another version of transformers does not have
    are not compared, and neither are weights: they may be quantized, or of another precision.

    Args:
        path: The file.
        model: As for ``InitialStates``.

    Raises:
        ValueError: For a file that is missing, damaged or not an adapter, one of another model, and values that are NaN
            or infinite.
    """
    found, name = InitialStates(model), repr(str(path))
    facts = states.read_metadata(path)
    if facts.get("adapter") != KIND:
        raise ValueError(f"{name} is the file of a state, not of an adapter, which InitialStates.save writes")
    # As the file has them.
    config = json.loads(json.dumps(_config(found.model), default=str))
    try:
        other = json.loads(facts["config"])
        if isinstance(found.model, Decoder):
            other = {**dict.fromkeys(config), **other}
        else:
            config |= {key: value for key, value in other.items() if key not in config}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} has no readable config of its model: {error}") from error
    # Of another type of model, everything differs.
    kinds = ["model_type"] if other.get("model_type") != config.get("model_type") else other
    if odd := [
        f"{key}={other.get(key)!r} in place of {config.get(key)!r}"
        for key in kinds
        if other.get(key) != config.get(key)
    ]:
        raise ValueError(f"{name} is an adapter of another model, which has {', '.join(odd)}")
    state = states.load(path, _wide(found.model.init_state(1)))
    if (rows := len(state.position)) != 1 or int(state.position):
        raise ValueError(f"{name} must have one row before the start token, not {rows} at {state.position.tolist()}")
    leaves = pytree.tree_leaves(state)
    with torch.no_grad():
        for place, own in found._places.items():
            found.get_parameter(own).copy_(leaves[place][0])
    try:
        found._finite()
    except ValueError as error:
        raise ValueError(f"{name} cannot be used: {error}") from error
    return found


def _layers(state: DecoderState) -> tuple[Any, ...]:
    """Return the states of all layers, in a universal stack those of each step."""
    return state.layers.layers if isinstance(state.layers, UniversalState) else state.layers


def _learned(model: Decoder | ForeignModel, state: DecoderState) -> Iterator[tuple[int, int, str, Tensor]]:
    """Yield the place of each tensor to train in a flat state, its layer, its name there, and the tensor."""
    mechanisms = model.stack.attentions() if isinstance(model, Decoder) else []
    for place, (path, t) in enumerate(named(state).items()):
        number, _, field = path.removeprefix("state.layers.").removeprefix("layers.").partition(".")
        if not number.isdigit() or not t.is_floating_point() or not t.numel():
            continue
        if isinstance(model, Decoder):
            learns = field in mechanisms[int(number) % len(mechanisms)].learned_state
        else:
            learns = model.learns(field)
        if learns:
            yield place, int(number), field.lstrip("0123456789.").replace(".", "_"), t


def _wide(state: DecoderState) -> DecoderState:
    """Return a state in float32 at least, as files of adapters have it."""
    return pytree.tree_map(upcast_half, state)


def _config(model: Decoder | ForeignModel) -> dict[str, Any]:
    facts = model.facts if isinstance(model, ForeignModel) else model.config.to_dict()
    return {name: value for name, value in facts.items() if name not in UNCOMPUTED}
