"""Masks as objects; True means keep, as everywhere in longspan."""

from typing import NamedTuple

import torch
from torch import Tensor


class BaseMask:
    """Base class of masks. A custom mask defines ``bool_matrix``; every other property follows from it.

    Properties are computed once and cached. The float matrices are float32, as in the original. The attentions here
    read only ``bool_matrix``, so they work in every dtype.
    """

    @property
    def bool_matrix(self) -> Tensor:
        """The mask itself, bool: (N, L) for lengths, (L, S) for attention."""
        raise NotImplementedError(f"{type(self).__name__} must define bool_matrix")

    @property
    def float_matrix(self) -> Tensor:
        """1 where kept, 0 elsewhere, float32."""
        return self._once("_float_matrix", lambda: self.bool_matrix.float())

    @property
    def additive_matrix(self) -> Tensor:
        """0 where kept, -inf elsewhere, float32."""
        return self._once("_additive_matrix", lambda: self.bool_matrix.float().log())

    @property
    def additive_matrix_finite(self) -> Tensor:
        """0 where kept, -1e24 elsewhere, float32."""
        return self._once("_additive_matrix_finite", lambda: (~self.bool_matrix).float() * -1e24)

    @property
    def lengths(self) -> Tensor:
        """Number of positions that each row keeps, int64; ValueError unless a row's kept positions come first."""

        def count() -> Tensor:
            matrix = self.bool_matrix
            lengths = matrix.long().sum(-1)
            first = torch.arange(matrix.shape[-1], device=matrix.device) < lengths[..., None]
            if not torch.equal(first, matrix):
                raise ValueError("not a length mask: a row keeps a position after one that it drops")
            return lengths

        return self._once("_lengths", count)

    @property
    def shape(self) -> torch.Size:
        """Shape of ``bool_matrix``."""
        return self.bool_matrix.shape

    @property
    def all_ones(self) -> bool:
        """Whether everything is kept."""
        return self._once("_all_ones", lambda: bool(self.bool_matrix.all()))

    @property
    def lower_triangular(self) -> bool:
        """Whether row i keeps exactly its first i + 1 positions, the mask of causal attention."""

        def compare() -> bool:
            rows = self.shape
            if len(rows) != 2:
                return False
            matrix = self.bool_matrix
            return torch.equal(matrix, torch.ones_like(matrix).tril()) and rows[0] <= rows[1]

        return self._once("_lower_triangular", compare)

    def _once(self, name, compute):
        if name not in self.__dict__:
            with torch.no_grad():
                self.__dict__[name] = compute()
        return self.__dict__[name]


class FullMask(BaseMask):
    """Any mask, from a bool tensor, or all ones: ``FullMask(N)``, ``FullMask(N, M)``.

    Args:
        mask: a bool tensor, which is copied; None means all ones.
        N: number of rows without a tensor.
        M: number of columns without a tensor; None means N.
        device: device of a mask without a tensor.

    Raises:
        ValueError: the tensor is not bool, or neither tensor nor size is given.
    """

    def __init__(self, mask=None, N=None, M=None, device: torch.device | str = "cpu"):
        if isinstance(mask, int):
            # FullMask(N) and FullMask(N, M) pass the sizes one position to the left of their names.
            mask, N, M = None, mask, N if M is None else M
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(f"FullMask expects a bool tensor, not {came}; True means keep")
            self._bool_matrix = mask.detach().clone()
        elif N is None:
            raise ValueError("FullMask needs a bool tensor, or the size N of a mask that keeps everything")
        else:
            self._bool_matrix = torch.ones(N, N if M is None else M, dtype=torch.bool, device=device)
            self._all_ones = True

    @property
    def bool_matrix(self) -> Tensor:
        return self._bool_matrix


class LengthMask(BaseMask):
    """Mask that keeps the first ``lengths[i]`` positions of row i, of shape (len(lengths), max_len).

    Args:
        lengths: int64 (N,).
        max_len: number of columns; None means the largest length, which synchronizes a GPU.
        device: device of the mask; None means that of ``lengths``.

    Raises:
        ValueError: lengths are not one-dimensional.
    """

    def __init__(self, lengths, max_len=None, device=None):
        lengths = torch.as_tensor(lengths, device=device)
        if lengths.dim() != 1:
            raise ValueError(f"lengths must be one-dimensional, one number per sequence, not {tuple(lengths.shape)}")
        size = int(lengths.max()) if max_len is None else int(max_len)
        self._bool_matrix = torch.arange(size, device=lengths.device) < lengths[:, None]

    @property
    def bool_matrix(self) -> Tensor:
        return self._bool_matrix


class TriangularCausalMask(LengthMask):
    """Causal mask: row i keeps its first i + 1 of ``N`` positions."""

    def __init__(self, N: int, device: torch.device | str = "cpu"):
        super().__init__(torch.arange(1, N + 1, device=device), max_len=N)
        self._lower_triangular = True
        self._all_ones = N <= 1


class Masks(NamedTuple):
    """What an attention over whole sequences may see."""

    attention: BaseMask  # (L,S)
    queries: BaseMask  # (N,L)
    keys: BaseMask  # (N,S)


def whole(batch: int, length: int, device: torch.device) -> LengthMask:
    """Return the length mask of a batch without padding, with ``all_ones`` already set."""
    mask = LengthMask(torch.full((batch,), length, dtype=torch.long, device=device), max_len=length)
    mask.__dict__["_all_ones"] = True
    return mask


def keys_of(key_lengths: BaseMask) -> Tensor | None:
    """Return the kept keys, bool (N,S); None if all are kept."""
    # Under a compiler no branch may depend on data. A mask of all ones gives the same result.
    if torch.compiler.is_compiling() and "_all_ones" not in key_lengths.__dict__:
        return key_lengths.bool_matrix
    return None if key_lengths.all_ones else key_lengths.bool_matrix


def visible(attn_mask: BaseMask, key_lengths: BaseMask) -> tuple[Tensor | None, bool]:
    """Return the arguments ``mask`` and ``causal`` of ``ops.softmax.attend``.

    The mask broadcasts to (N,H,L,S). It is None if nothing is hidden, or if the causal mask is all that there is.
    """
    keys = keys_of(key_lengths)
    if keys is None and attn_mask.lower_triangular and attn_mask.shape[0] == attn_mask.shape[1]:
        return None, True
    mask = None if attn_mask.all_ones else attn_mask.bool_matrix[None, None]
    if keys is not None:
        keys = keys[:, None, None, :]
        mask = keys if mask is None else mask & keys
    return mask, False
