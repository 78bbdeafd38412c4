"""A tree of the texts that were read before, with states, so that a text with the same beginning starts at one of them.

References:
    Pan et al. 2024, Marconi (2411.19379): states where two texts part, and eviction by what a loss would cost.
"""

import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import states
from ..states.kv_cache import FixedKeyValues

HALF_LIFE = 256  # prompts after which a visit counts half
# A text is continued at the end of a prompt or of an answer, or where two texts have parted, this many times as often
# as at another place.
LIKELY = 64.0
WORTH = 16  # tokens whose reading takes as long as another call, or longer

Span = tuple[Tensor, Tensor]


@dataclass(eq=False)
class Checkpoint:
    """The state after a node's tokens, and the outputs of the last one."""

    leaves: list[Any]
    """its tensors; in place of a KV cache, whose entries are in the spans of the branch, its capacity"""
    spec: Any
    outputs: Tensor
    visits: float
    seen: int
    """the number of prompts before its last visit"""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.outputs.nbytes + states.nbytes([leaf for leaf in self.leaves if not isinstance(leaf, int)])


@dataclass(eq=False)
class Node:
    """Tokens that follow those of the parent, with their entries of KV caches."""

    parent: "Node | None"
    tokens: array
    spans: list[Span]
    depth: int
    """the number of tokens from the root to the end of this node"""
    children: dict[int, "Node"] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    number: int = field(default_factory=itertools.count().__next__)
    """the order in which nodes were made"""

    @property
    def nbytes(self) -> int:
        """Bytes without the checkpoint."""
        return len(self.tokens) * self.tokens.itemsize + sum(t.nbytes for span in self.spans for t in span)

    def branch(self) -> Iterator["Node"]:
        """Yield this node and those before it, except for the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def ahead(self, default: int) -> int:
        """Return the number of tokens to the next state after this node, ``default`` if there is none."""
        nodes = list(self.children.values())
        while nodes:
            if found := [node.depth for node in nodes if node.checkpoint is not None]:
                return min(found) - self.depth
            nodes = [child for node in nodes for child in node.children.values()]
        return default

    def known(self) -> "Node | None":
        """Return the deepest node with a checkpoint up to here."""
        return next((node for node in self.branch() if node.checkpoint is not None), None)


class PrefixCache:
    """Keeps states of the beginnings of texts, and forgets those whose loss costs the fewest tokens.

    A recurrent state cannot be cut back to fewer tokens, so it serves only texts that begin with all of its tokens. The
    entries of KV caches are kept once for all states of a branch, without free slots.

    If memory runs out, the state goes whose tokens are soon read again: those since the state before it, times its
    expected visits, for each byte. Older visits count less, and the tokens up to the next state count a little. So the
    states of a long text thin out evenly, and the ends of prompts go last.

    Args:
        limit: Bytes of all states and tokens together; 0 keeps none.
        every: Tokens between the states of one text.
    """

    def __init__(self, limit: int, every: int = 256):
        if limit < 0:
            raise ValueError(f"limit={limit} must be a number of bytes >= 0")
        if every < 1:
            raise ValueError(f"every={every} must be a number of tokens >= 1")
        self.limit, self.every = limit, every
        self.hits = 0
        self.misses = 0
        self.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, tokens: Sequence[int]) -> tuple[int, Any, Tensor] | None:
        """Return the longest beginning of a text whose state is known.

        Args:
            tokens: The text, with its start token.

        Returns:
            The number of tokens read, a copy of the state (one row) and of the outputs (1,size) after them; None if no
            beginning is known.
        """
        node = self._descend(_as_array(tokens))[0].known()
        if node is None or node.checkpoint is None:
            self.misses += 1
            return None
        found = node.checkpoint
        found.visits, found.seen = found.visits * self._aged(found) + 1, self.hits + self.misses
        self.hits += 1
        spans = iter(range(len(node.spans)))
        leaves = [
            _cache(node, next(spans), leaf) if isinstance(leaf, int) else states.clone(leaf) for leaf in found.leaves
        ]
        return node.depth, pytree.tree_unflatten(leaves, found.spec), found.outputs.clone()

    def parting(self, tokens: Sequence[int], read: int) -> int:
        """Return where a text parts from all known ones, if a state there is worth another call; else 0.

        Args:
            tokens: The text.
            read: Tokens of its longest beginning whose state is known.
        """
        node, _, common = self._descend(_as_array(tokens))
        shared = node.depth + common
        return shared if read + WORTH <= shared < len(tokens) else 0

    def keep(self, tokens: Sequence[int], state: Any, outputs: Tensor, *, likely: bool = True) -> None:
        """Keep a copy of the state (one row) and the outputs (1,size) after ``tokens``.

        A state is not kept if a known text with the same tokens has other entries of KV caches, as of tokens that were
        read in other pieces: what is found is always one state.

        Args:
            tokens: All tokens that the state has read.
            state: The state.
            outputs: The outputs of the last token.
            likely: Whether a text is probably continued here, as at the end of a prompt.
        """
        tokens = _as_array(tokens)
        node, child, common = self._descend(tokens)
        visits = float(likely)
        if node.depth == len(tokens) and node.checkpoint is not None:
            node.checkpoint.visits = max(node.checkpoint.visits, visits)
            return
        leaves, spec = pytree.tree_flatten(state, is_leaf=lambda part: isinstance(part, FixedKeyValues))
        whole = [isinstance(leaf, FixedKeyValues) and int(leaf.length) == len(tokens) for leaf in leaves]
        caches = [leaf for leaf, shared in zip(leaves, whole, strict=True) if shared]
        with torch.no_grad():
            rest = [
                leaf.keys.shape[2] if shared else states.clone(leaf) for leaf, shared in zip(leaves, whole, strict=True)
            ]
            made = Checkpoint(rest, spec, outputs.clone(), visits, self.hits + self.misses)
            size = 8 * len(tokens) + made.nbytes + sum(_bytes_per_slot(cache) * len(tokens) for cache in caches)
            if size > self.limit or not _agree(child or node, caches, node.depth + common):
                return
            if child is not None:
                node = self._split(child, common)
            if more := tokens[node.depth :]:
                spans = [
                    (
                        cache.keys[:, :, node.depth : len(tokens)].clone(),
                        cache.values[:, :, node.depth : len(tokens)].clone(),
                    )
                    for cache in caches
                ]
                node = self._add(Node(node, more, spans, len(tokens)))
        node.checkpoint = made
        self._kept[node] = None
        self.nbytes += made.nbytes
        if self.nbytes > self.limit:
            self._evict(node)

    def clear(self) -> None:
        """Forget all states."""
        self._root = Node(None, array("q"), [], 0)
        self._kept: dict[Node, None] = {}  # the nodes with a checkpoint
        self.nbytes = 0

    def _descend(self, tokens: array) -> tuple[Node, Node | None, int]:
        """Follow a text -> the last node that it has whole, the next one, and how many tokens of that it has."""
        node = self._root
        while (child := node.children.get(tokens[node.depth]) if node.depth < len(tokens) else None) is not None:
            part = tokens[node.depth : child.depth]
            if part != child.tokens:
                pairs = zip(part, child.tokens, strict=False)
                return node, child, next((i for i, (a, b) in enumerate(pairs) if a != b), len(part))
            node = child
        return node, None, 0

    def _split(self, node: Node, count: int) -> Node:
        """Give the first tokens of a node to a new parent -> the parent."""
        assert node.parent is not None
        self.nbytes -= node.nbytes
        # Copies, so that either part can be dropped.
        first = [(k[:, :, :count].clone(), v[:, :, :count].clone()) for k, v in node.spans]
        node.spans = [(k[:, :, count:].clone(), v[:, :, count:].clone()) for k, v in node.spans]
        upper = self._add(Node(node.parent, node.tokens[:count], first, node.parent.depth + count))
        node.parent, node.tokens = upper, node.tokens[count:]
        self._add(node)
        return upper

    def _add(self, node: Node) -> Node:
        assert node.parent is not None
        node.parent.children[node.tokens[0]] = node
        self.nbytes += node.nbytes
        return node

    def _evict(self, newest: Node) -> None:
        """Drop states down to the limit, the newest last; of many, some more, so that not each new one searches."""
        target = self.limit - (self.limit // 16 if len(self) > 64 else 0)
        order = [(self._loss(node), node.number, node) for node in self._kept if node is not newest]
        heapq.heapify(order)
        while self.nbytes > target and order:
            loss, number, node = heapq.heappop(order)
            # It has grown if a state next to it was dropped.
            if (now := self._loss(node)) > loss:
                heapq.heappush(order, (now, number, node))
            else:
                self._drop(node)
        if self.nbytes > self.limit:
            self._drop(newest)

    def _loss(self, node: Node) -> float:
        """The tokens that will be read again without a node's state, for each byte that it takes."""
        checkpoint, before = node.checkpoint, node.parent and node.parent.known()
        assert checkpoint is not None
        # Any token up to the next state may be one where a text goes on from here.
        visits = checkpoint.visits + node.ahead(self.every) / (self.every * LIKELY)
        size = checkpoint.nbytes + (0 if node.children else node.nbytes)
        return (node.depth - (before.depth if before else 0)) * visits * self._aged(checkpoint) / size

    def _aged(self, checkpoint: Checkpoint) -> float:
        return 0.5 ** ((self.hits + self.misses - checkpoint.seen) / HALF_LIFE)

    def _drop(self, node: Node) -> None:
        """Drop the state of a node, and the nodes that no state needs any more."""
        assert node.checkpoint is not None
        self.nbytes -= node.checkpoint.nbytes
        node.checkpoint = None
        del self._kept[node]
        while node.parent is not None and node.checkpoint is None and not node.children:
            self.nbytes -= node.nbytes
            del node.parent.children[node.tokens[0]]
            node = node.parent


def _as_array(tokens: Sequence[int]) -> array:
    return tokens if isinstance(tokens, array) else array("q", tokens)


def _agree(node: Node, caches: list[FixedKeyValues], end: int) -> bool:
    """Whether the spans of a branch hold the entries of caches, up to this token."""
    for part in node.branch():
        start = part.depth - len(part.tokens)
        for span, cache in zip(part.spans, caches, strict=True):
            for known, found in zip(span, (cache.keys, cache.values), strict=True):
                if not torch.equal(known[:, :, : end - start], found[:, :, start : min(end, part.depth)]):
                    return False
    return True


def _bytes_per_slot(cache: FixedKeyValues) -> int:
    return (cache.keys.nbytes + cache.values.nbytes) // max(1, cache.keys.shape[2])


def _cache(node: Node, place: int, capacity: int) -> FixedKeyValues:
    """Return the KV cache with the entries of a branch: the spans at ``place`` of each node."""
    parts = [part.spans[place] for part in reversed(list(node.branch()))]
    keys, values = (
        torch.nn.functional.pad(torch.cat(tensors, 2), (0, 0, 0, capacity - node.depth))
        for tensors in zip(*parts, strict=True)
    )
    return FixedKeyValues(keys, values, torch.tensor([node.depth], device=keys.device))
