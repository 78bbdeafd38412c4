"""Landmarks: the sequence cut into segments of about one length, each of them told by the mean of its tokens."""

import torch
from torch import Tensor

from ..tensors import merge, positions, split, upcast_half


def segments_of(x: Tensor, landmarks: int, mask: Tensor | None = None) -> Tensor:
    """Which tokens are in which segment: token t of n real ones in number t * landmarks // n.

    x (B,H,N,D), mask (B,N) bool -> bool (B|1,landmarks,N). The sizes of a row's segments differ by one at most; where
    it has fewer tokens than landmarks, some are empty and the others have one token each.
    """
    at, count = positions(x.transpose(1, 2), mask=mask)
    if mask is None:
        at, count = at[:1], count[:1]
    number = at * landmarks // count.clamp(min=1)[:, None]
    found = number[:, None] == torch.arange(landmarks, device=x.device)[:, None]
    return found if mask is None else found & mask[:, None]


def segment_means(x: Tensor, members: Tensor) -> Tensor:
    """The mean of each segment: x (B,H,N,D), members bool (B|1,m,N) -> (B,H,m,D), zeros for one without tokens.

    What x holds where no segment has a member must be finite. Time O(N m D) as one product, memory O(N (m + D)).

    Source: Xiong et al. 2021 (2102.03902), section 3.2, where all segments have N / m tokens.
    """
    sums = split(members.to(x.dtype) @ merge(x), x.shape[1])
    sizes = members.sum(-1).clamp(min=1)[:, None, :, None]
    return (upcast_half(sums) / sizes).to(x.dtype)
