"""Landmarks: the means of segments of about equal length."""

import torch
from torch import Tensor

from ..tensors import merge, positions, split, upcast_half


def segments_of(x: Tensor, landmarks: int, mask: Tensor | None = None) -> Tensor:
    """Return the tokens of each segment: of n real tokens, token t is in segment t * landmarks // n.

    The sizes of a row's segments differ by at most one. If a row has fewer tokens than landmarks, some segments are
    empty and the others have one token each.

    Args:
        x: (B,H,N,D) tokens.
        landmarks: Number of segments.
        mask: (B,N) bool, True on real tokens; None: all are.

    Returns:
        A bool tensor (B|1,landmarks,N).
    """
    at, count = positions(x.transpose(1, 2), mask=mask)
    if mask is None:
        at, count = at[:1], count[:1]
    number = at * landmarks // count.clamp(min=1)[:, None]
    found = number[:, None] == torch.arange(landmarks, device=x.device)[:, None]
    return found if mask is None else found & mask[:, None]


def segment_means(x: Tensor, members: Tensor) -> Tensor:
    """Average the tokens of each segment, as one matrix product in O(N m D) time and O(N (m + D)) memory.

    Args:
        x: (B,H,N,D) tokens; those outside all segments must be finite.
        members: (B|1,m,N) bool, the tokens of each segment.

    Returns:
        The means (B,H,m,D), 0 for an empty segment.

    References:
        Xiong et al. 2021 (2102.03902), section 3.2, where all segments have N / m tokens.
    """
    sums = split(members.to(x.dtype) @ merge(x), x.shape[1])
    sizes = members.sum(-1).clamp(min=1)[:, None, :, None]
    return (upcast_half(sums) / sizes).to(x.dtype)
