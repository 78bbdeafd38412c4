"""State adapters: the initial states of recurrent layers as trainable parameters, with all weights as they are.

References:
    S0 tuning, arXiv 2604.01168: the initial state of each recurrent layer is all that is trained.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import states
from .attention.validation import check_tokens
from .models.decoder import Decoder, DecoderState
from .models.stacks.universal import UniversalState
from .ops.segments import numbered
from .ops.tensors import positions

KIND = "initial-states"
# Fields of a config that change neither the sizes nor the outputs in evaluation mode.
UNCOMPUTED = ("dropout", "checkpointing", "feedforward_chunk")


@dataclass(frozen=True, eq=False)
class FrozenStates:
    """The values of an adapter, from which a pool starts streams."""

    state: DecoderState
    """one row, before the start token"""
    sha256: str
    """of these values: adapters with the same values share cached prefixes, others never do"""


class InitialStates(nn.Module):
    """The initial states of the recurrent layers of a decoder, as parameters.

    They begin with the values of the model, so that an untrained adapter changes nothing. The parameters of layer ``i``
    are those of ``layers[i]``, by the name of the field of its state, without the dimension of rows. The model is not a
    submodule: ``parameters()`` has the states alone.

    Args:
        model: The decoder. Its weights are left as they are; ``model.requires_grad_(False)`` saves their gradients.

    Raises:
        ValueError: For a model of another kind, and one without a recurrent state to train.
    """

    model: Decoder

    def __init__(self, model: Decoder):
        super().__init__()
        if not isinstance(model, Decoder):
            raise ValueError(f"state adapters need a longspan.Decoder, not {type(model).__name__}")
        object.__setattr__(self, "model", model)  # not a submodule
        mechanisms = model.stack.attentions()
        self.layers = nn.ModuleList()
        for i, layer in enumerate(_layers(model.init_state(1))):
            fields = mechanisms[i % len(mechanisms)].learned_state
            values = {name: getattr(layer, name) for name in fields if name in layer._fields}
            own = nn.Module()
            for name, t in values.items():
                if t.numel():
                    own.register_parameter(name, nn.Parameter(t[0].detach().clone()))
            self.layers.append(own)
        if not list(self.parameters()):
            names = ", ".join(dict.fromkeys(one.spec for one in mechanisms))
            raise ValueError(
                f"the state of {names} has no sums to train: it keeps tokens; state adapters need a recurrent layer "
                "such as linear, gla or gated_deltanet"
            )

    def states(self, batch: int, capacity: int | None = None) -> DecoderState:
        """Return the state of the model before the start token, through which gradients reach the parameters.

        Args:
            batch: Number of rows, B.
            capacity: Slots of KV caches, as in ``Decoder.init_state``.

        Returns:
            The state, which shares no memory with the parameters.
        """
        state = self.model.init_state(batch, capacity)
        layers: list[Any] = []
        for own, layer in zip(self.layers, _layers(state), strict=True):
            values = {name: t[None].to(getattr(layer, name)) for name, t in own.named_parameters()}
            layers.append(layer._replace(**{n: t.repeat(batch, *(1,) * (t.dim() - 1)) for n, t in values.items()}))
        return _with_layers(state, tuple(layers))

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
            tokens: (B,N) int64, as for the model; ``model.shift`` puts the start token in front.
            mask: (B,N) bool, True on real tokens; either side may be padded.
            segments: (B,N) int64, packed sequences: each starts from the learned states. They are read as rows of their
                own, padded to the longest one, because a packed row of recurrent states has one state only.
            targets: (B,N) int64. The result is then the log-probability of each in nats.

        Returns:
            Outputs (B,N,likelihood.size), or log-probabilities (B,N).

        Raises:
            ValueError: For arguments that the model does not accept.
        """
        if segments is None or not tokens.numel():
            return self.model(tokens, self.states(len(tokens)), mask=mask, targets=targets)[0]
        given = {"segments": segments} | ({} if mask is None else {"mask": mask})
        ids = check_tokens(self.model.stack.attentions()[0], tokens, given)["segments"]
        number, place = numbered(ids), positions(tokens, segments=ids)[0]
        counts = number[:, -1] + 1
        row = number + (counts.cumsum(0) - counts)[:, None]
        rows, width = int(counts.sum()), int(place.max()) + 1

        def apart(values: Tensor) -> Tensor:
            return values.new_zeros(rows, width).index_put((row, place), values)

        real = apart(torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)
        more = None if targets is None else apart(targets)
        return self.model(apart(tokens), self.states(rows), mask=real, targets=more)[0][row, place]

    def frozen(self) -> FrozenStates:
        """Return a copy of the present values, for ``Pool.submit``.

        Raises:
            ValueError: For values that are NaN or infinite.
        """
        with torch.no_grad():
            state, digest = self.states(1), hashlib.sha256()
            for name, t in self._finite():
                digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
                digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return FrozenStates(state, digest.hexdigest())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the adapter to one safetensors file, atomically: a state of one row, with the config of the model.

        Args:
            path: The file; an older one is replaced.

        Raises:
            ValueError: For values that are NaN or infinite, and a path that cannot be written.
        """
        self._finite()
        with torch.no_grad():
            states.save(self.states(1), path, {"adapter": KIND, "config": json.dumps(_config(self.model))})

    def _finite(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters by name. Raises ValueError for one that is NaN or infinite."""
        found = list(self.named_parameters())
        if odd := [name for name, t in found if not t.isfinite().all()]:
            raise ValueError(f"the initial states {', '.join(odd)} are NaN or infinite")
        return found


def initial_states(model: Decoder) -> InitialStates:
    """Make the initial states of all recurrent layers of a decoder trainable.

    Sums, fast weights and the last inputs of convolutions are trained. KV caches, windows of tokens and counters stay
    as they are; so do the layers that have nothing else.

    Args:
        model: The decoder.

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


def load(path: str | os.PathLike[str], model: Decoder) -> InitialStates:
    """Read an adapter that ``InitialStates.save`` has written.

    The config of the model must be that of the model for which the adapter was trained, except for dropout,
    checkpointing and chunks of the feed-forward network. Weights are not compared: they may be quantized.

    Args:
        path: The file.
        model: The decoder.

    Raises:
        ValueError: For a file that is missing, damaged or not an adapter, one of another model, and values that are NaN
            or infinite.
    """
    found, name = InitialStates(model), repr(str(path))
    facts = states.read_metadata(path)
    if facts.get("adapter") != KIND:
        raise ValueError(f"{name} is the file of a state, not of an adapter, which InitialStates.save writes")
    config = _config(model)
    try:
        other = {**dict.fromkeys(config), **json.loads(facts["config"])}
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{name} has no readable config of its model: {error}") from error
    if odd := [
        f"{key}={value!r} in place of {config.get(key)!r}" for key, value in other.items() if value != config.get(key)
    ]:
        raise ValueError(f"{name} is an adapter of another model, which has {', '.join(odd)}")
    like = model.init_state(1)
    state = states.load(path, like)
    if (rows := len(state.position)) != 1 or int(state.position):
        raise ValueError(f"{name} must have one row before the start token, not {rows} at {state.position.tolist()}")
    with torch.no_grad():
        for own, layer in zip(found.layers, _layers(state), strict=True):
            for field, values in own.named_parameters():
                values.copy_(getattr(layer, field)[0])
    try:
        found._finite()
    except ValueError as error:
        raise ValueError(f"{name} cannot be used: {error}") from error
    return found


def _layers(state: DecoderState) -> tuple[Any, ...]:
    """Return the states of all layers, in a universal stack those of each step."""
    return state.layers.layers if isinstance(state.layers, UniversalState) else state.layers


def _with_layers(state: DecoderState, layers: tuple[Any, ...]) -> DecoderState:
    """Return a state with other states of its layers."""
    if isinstance(state.layers, UniversalState):
        return state._replace(layers=state.layers._replace(layers=layers))
    return state._replace(layers=layers)


def _config(model: Decoder) -> dict[str, Any]:
    return {name: value for name, value in model.config.to_dict().items() if name not in UNCOMPUTED}
