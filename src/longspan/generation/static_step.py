"""The decode step on fixed memory, so that a CUDA graph can replay it: one launch per token in place of hundreds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..attention import Attention
from ..models.decoder import Decoder, DecoderState
from ..models.seq2seq import Seq2Seq
from ..models.stacks.block import Block
from ..ops.backends import forced_backend
from ..states import fix_capacity
from ..states.kv_cache import FixedKeyValues

WARM_UP = 3  # steps before the capture, in which kernels are compiled and libraries allocate their workspaces

# Mechanisms whose decode step neither waits for the device nor uploads to it, and keeps the shapes of its state.
CAPTURABLE = frozenset(
    "adaptive_span alibi average axial bigbird compressive deltanet exact_topk fast_weights fourier gated_deltanet "
    "gaussian gla image infini kda kernel linear local longformer luna performer polynomial poolingformer realformer "
    "reformer relative retention rfa routing softmax sparse sparse_transformer ssd synthesizer talking_heads "
    "transformer_xl".split()
)

Step = Callable[[Tensor, DecoderState], tuple[Tensor, DecoderState]]
Run = Callable[[], None]
Capture = Callable[[Run, Run, torch.device], Run]


def capture_cuda_graph(run: Run, restore: Run, device: torch.device) -> Run:
    """Capture ``run`` in a CUDA graph.

    Args:
        run: Computes on tensors that keep their addresses.
        restore: Undoes what ``run`` has changed.
        device: The CUDA device of these tensors.

    Returns:
        A function that replays the graph. The tensors are as before the call.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                run()
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile. The capture itself computes nothing.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    return graph.replay


class StaticStep:
    """A decode step whose tensors keep their addresses: ``outputs, state = step(token, state)``.

    The first call copies its token and its state into buffers and captures the step on them. Each call writes its token
    into the buffer and replays the step, which ends by copying back what the step has returned as new tensors. Outputs
    and state are overwritten by the next call.

    Args:
        step: Maps tokens (B,1) and a state to outputs (B,1,size) and the next state; it may overwrite the state.
        capture: Called with a function that computes on the buffers, one that undoes this, and the device; returns the
            function that replays the first one, such as ``capture_cuda_graph``.
    """

    def __init__(self, step: Step, capture: Capture):
        self.step, self.capture = step, capture
        self.replay: Run | None = None
        self.token: Tensor
        self.state: DecoderState
        self.outputs: Tensor

    @torch.no_grad()
    def __call__(self, token: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read the next token.

        Args:
            token: (B,1) int64.
            state: Any state in the first call, later the one that the last call has returned.

        Returns:
            Outputs (B,1,size) and the next state; the next call overwrites both.

        Raises:
            ValueError: For another state than that of the last call, and for a state whose shapes change in a step.
        """
        if self.replay is None:
            self.token, self.state = token.clone(), _buffers(state)
            kept = [(buffer, buffer.clone()) for buffer in _restored(self.state)]

            def restore() -> None:
                for buffer, value in kept:
                    buffer.copy_(value)

            self.replay = self.capture(self._run, restore, token.device)
        elif state is not self.state:
            raise ValueError("a static step continues the state of its last call; build one for each sequence")
        else:
            self.token.copy_(token)
        self.replay()
        return self.outputs, self.state

    def _run(self) -> None:
        self.outputs, after = self.step(self.token, self.state)
        write_back(self.state, after)


def write_back(buffers: Any, after: Any) -> None:
    """Copy a state into the buffers of the state before it, except tensors that are in place already.

    Raises:
        ValueError: For a state of other shapes or dtypes.
    """
    old, new = pytree.tree_leaves(buffers), pytree.tree_leaves(after)
    if [(t.shape, t.dtype) for t in old] != [(t.shape, t.dtype) for t in new]:
        raise ValueError("the state changes its shapes or dtypes in a step, so it has no fixed memory")
    moved = [(a, b) for a, b in zip(old, new, strict=True) if not _same_memory(a, b)]
    used = {t.untyped_storage().data_ptr() for t in old}
    # A tensor in another buffer is copied before that buffer changes.
    moved = [(a, b.clone() if b.untyped_storage().data_ptr() in used else b) for a, b in moved]
    for buffer, value in moved:
        buffer.copy_(value)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are the same elements in memory."""
    strides = ((i, j) for i, j, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)
    return a is b or (a.data_ptr() == b.data_ptr() and all(i == j for i, j in strides))


def _is_cache(part: Any) -> bool:
    return isinstance(part, FixedKeyValues)


def _buffers(state: DecoderState) -> DecoderState:
    """Copy a state, such that no part shares memory with another one, with weights or with a context.

    Keys and values of a cache of fixed capacity, which may be large, have memory of their own and are not copied.
    """

    def copied(part: Any) -> Any:
        if _is_cache(part):
            return FixedKeyValues(part.keys.contiguous(), part.values.contiguous(), part.length.clone())
        return part.clone(memory_format=torch.contiguous_format)

    return pytree.tree_map(copied, state, is_leaf=_is_cache)


def _restored(state: DecoderState) -> list[Tensor]:
    """The tensors to restore after a step; not a cache, whose next token overwrites the same slot."""
    parts = pytree.tree_leaves(state, is_leaf=_is_cache)
    return [part.length if _is_cache(part) else part for part in parts]


def why_not(model: Decoder | Seq2Seq) -> str:
    """Return why the decode step of a model cannot be a CUDA graph, "" if it can."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if any(device.type != "cuda" for device in devices):
        return f"the model is on {', '.join(sorted(map(str, devices)))}, and CUDA graphs need a CUDA device"
    if len(devices) > 1:
        return f"the weights are on several devices: {', '.join(sorted(map(str, devices)))}"
    return why_not_capturable(model)


def why_not_capturable(model: Decoder | Seq2Seq) -> str:
    """Return why the decode step of a model cannot be captured on any device, "" if it can."""
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "autocast is on; convert the model with model.to(torch.bfloat16)"
    if forced_backend() not in ("auto", "torch", "triton"):
        return f"the backend {forced_backend()} is forced"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return f"{name or 'the model'} has hooks or a replaced forward, which a graph would not run"
        if module.training and _drops(module):
            return "dropout is active; call model.eval()"
    for block in model.stack.blocks:
        assert isinstance(block, Block)
        for attention in (block.attention, *([] if block.cross is None else [block.cross])):
            if reason := _uncapturable(attention):
                return reason
    return ""


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout):
        return module.p > 0
    return isinstance(module, Attention) and bool(getattr(module, "dropout", 0.0))


def _uncapturable(attention: Attention) -> str:
    if attention.name not in CAPTURABLE:
        return f"a step of {attention.name} waits for the device"
    if attention.causal and _sizes(attention, 0) != _sizes(attention, 8):
        return f"the state of {attention.spec} grows"
    if not isinstance(getattr(attention, "feature_map", ""), str):
        return f"the feature map of {attention.name} is a Python callable, which may wait for the device"
    return ""


def _sizes(attention: Attention, capacity: int) -> list[torch.Size]:
    """The shapes of a state that starts with ``capacity`` slots, and then gets 8 if it can have a fixed number."""
    return [leaf.shape for leaf in pytree.tree_leaves(fix_capacity(attention.init_state(1, capacity), 8))]
