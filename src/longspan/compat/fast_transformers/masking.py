"""Masks as objects; True means keep, as everywhere in longspan."""

import torch
from torch import Tensor


class BaseMask:
    """Which positions are kept. A mask of your own defines ``bool_matrix``; every other property follows from it.

    Answers are computed once and kept. The matrices of floats are float32, as in the original; the attentions here
    read ``bool_matrix`` alone, so they work in every dtype.
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
        """How many positions each row keeps, int64. Raises ValueError unless a row's kept positions come first."""

        def count() -> Tensor:
            matrix = self.bool_matrix
            lengths = matrix.long().sum(-1)
            first = torch.arange(matrix.shape[-1], device=matrix.device) < lengths[..., None]
            if not torch.equal(first, matrix):
                raise ValueError("not a length mask: a row keeps a position behind one that it drops")
            return lengths

        return self._once("_lengths", count)

    @property
    def shape(self) -> torch.Size:
        """Of ``bool_matrix``."""
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
    """Any mask: from a bool tensor, which is copied, or all ones of a size: ``FullMask(N)``, ``FullMask(N, M)``.

    M defaults to N. Raises ValueError for a tensor that is not bool and where neither tensor nor size is given.
    """

    def __init__(self, mask=None, N=None, M=None, device: torch.device | str = "cpu"):
        if isinstance(mask, int):
            # FullMask(N) and FullMask(N, M): the sizes stand one place to the left of their names.
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
    """The first ``lengths[i]`` positions of row i, in a matrix (len(lengths), max_len).

    ``lengths`` int64 (N,). ``max_len`` defaults to the largest length, which makes a GPU wait; better give it. Raises
    ValueError for lengths that are not one-dimensional.
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
    """Row i keeps its first i + 1 of ``N`` positions."""

    def __init__(self, N: int, device: torch.device | str = "cpu"):
        super().__init__(torch.arange(1, N + 1, device=device), max_len=N)
        self._lower_triangular = True
        self._all_ones = N <= 1


def whole(batch: int, length: int, device: torch.device) -> LengthMask:
    """The length mask of a batch without padding, which knows that it keeps everything without looking."""
    mask = LengthMask(torch.full((batch,), length, dtype=torch.long, device=device), max_len=length)
    mask.__dict__["_all_ones"] = True
    return mask


def keys_of(key_lengths: BaseMask) -> Tensor | None:
    """The kept keys, bool (N,S); None where all are."""
    # A compiler must not be asked what depends on data; a mask that is all ones gives the same answer.
    if torch.compiler.is_compiling() and "_all_ones" not in key_lengths.__dict__:
        return key_lengths.bool_matrix
    return None if key_lengths.all_ones else key_lengths.bool_matrix


def visible(attn_mask: BaseMask, key_lengths: BaseMask) -> tuple[Tensor | None, bool]:
    """What softmax attention may see: a mask that broadcasts to (N,H,L,S), or None, and whether it is causal instead.

    The two are the ``mask`` and ``causal`` of ``ops.softmax.attend``.
    """
    keys = keys_of(key_lengths)
    if keys is None and attn_mask.lower_triangular and attn_mask.shape[0] == attn_mask.shape[1]:
        return None, True
    mask = None if attn_mask.all_ones else attn_mask.bool_matrix[None, None]
    if keys is not None:
        keys = keys[:, None, None, :]
        mask = keys if mask is None else mask & keys
    return mask, False
