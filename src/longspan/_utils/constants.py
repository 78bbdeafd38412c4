"""Small constant tensors, uploaded to a device once."""

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

SHORT = 64  # elements of a tensor that is as fast to make as to look up

# Nothing is ever dropped: a CUDA graph reads its constants at the same addresses in each replay. The mode is that of
# fake tensors, which are valid in their mode alone.
_UPLOADED: dict[tuple[tuple[float, ...], torch.dtype, torch.device, object], Tensor] = {}


def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a constant tensor, which is kept for later calls, except for short ones on the CPU.

    An upload waits for the device, and a CUDA graph cannot capture it. The caller must not write into the result.

    Args:
        values: The elements.
        dtype: The dtype of the result.
        device: The device of the result.

    Returns:
        (len(values),).
    """
    short = device.type in ("cpu", "meta") and len(values) < SHORT
    if short or torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    key = values, dtype, device, detect_fake_mode()
    found = _UPLOADED.get(key)
    if found is None:
        # An inference tensor could not be saved for a backward pass.
        with torch.inference_mode(False):
            found = torch.tensor(values, dtype=dtype, device=device)
        if not torch._C._functorch.is_functorch_wrapped_tensor(found):  # pyright: ignore[reportAttributeAccessIssue] (a part of torch._C without stubs)
            _UPLOADED[key] = found
    return found
