"""Events of layers."""

from torch import Tensor, nn


class Event:
    """Base class of events; ``source`` is the module that dispatched the event."""

    def __init__(self, source: nn.Module):
        self.source = source


class AttentionEvent(Event):
    """Weights of the values: ``attention_matrix`` (N,H,L,S), or (N,H,S) in a recurrent model."""

    def __init__(self, source: nn.Module, attention_matrix: Tensor):
        super().__init__(source)
        self.attention_matrix = attention_matrix


class QKVEvent(Event):
    """Input of the inner attention: ``queries`` (N,L,H,E), ``keys`` (N,S,H,E), ``values`` (N,S,H,D)."""

    def __init__(self, source: nn.Module, queries: Tensor, keys: Tensor, values: Tensor):
        super().__init__(source)
        self.queries, self.keys, self.values = queries, keys, values


class IntermediateOutput(Event):
    """Output ``x`` of one layer of a stack."""

    def __init__(self, source: nn.Module, x: Tensor):
        super().__init__(source)
        self.x = x
