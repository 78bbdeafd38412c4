"""Export a decoder or an attention to ONNX: one graph for prefill and step, with one node per recurrence."""

import contextlib
import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from .._utils import atomic_io
from .._utils.optional_deps import need
from .._utils.spec import known
from .._utils.version import VERSION
from ..attention import Attention
from ..models.decoder import Decoder
from ..modules.quantized import Quantized
from ..ops import onnx as operator
from ..ops.onnx import DOMAINS, OPSET

LENGTHS, ROWS, BEFORE = (1, 9, 300), 3, 5
TOLERANCE = 1e-5


def export(model: Decoder | Attention, path: str | os.PathLike, *, domain: str = "com.microsoft") -> dict[str, Any]:
    """Write a causal model as an ONNX file, after checking that onnxruntime computes the same outputs.

    Inputs are ``tokens`` (B,N) int64 of a decoder, where ``vocab`` is the start token, or ``x`` (B,N,dim) of an
    attention, and the parts of the state, ``state.*``. Outputs are ``outputs`` (B,N,size) or ``y`` (B,N,dim), and the
    next state, ``next.*``, in the same order. B, N and the slots of keys and values are free; N = 1 is a step. The
    state before the first token is zeros. The file's metadata holds its shapes as JSON (-1: B; 0: the size grows). All
    rows have the same length: there is no mask.

    Args:
        model: a decoder or an attention, in float32 on the CPU.
        path: the file to write.
        domain: the domain of the node ``LinearAttention``, com.microsoft or ai.onnx.

    Returns:
        A dict with ``inputs``, ``outputs``, ``nodes`` (counts by operator), and ``difference``: the largest difference
        from the model at 1, 9 and 300 tokens of 3 rows, from the first state and from a later one.

    Raises:
        ValueError: the model cannot be exported, the path cannot be written, or an output or state differs by more than
            1e-5 of its largest number, or of 1. No file is written.
        ImportError: onnx, onnxruntime or onnxscript is missing.
    """
    atomic_io.check_output(Path(os.path.abspath(path)))
    need("the export to ONNX", "onnx", "onnxruntime", "onnxscript")
    known(domain, DOMAINS, "domain")
    if not hasattr(torch.onnx, "ops"):
        raise ValueError(f"the export to ONNX needs torch 2.8 or later, not {torch.__version__}")
    _check(model)
    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            graph = Graph(model.eval())
            proto = _proto(graph, domain)
            worst = _compare(graph, proto.SerializeToString())
    finally:
        model.train(training)
    try:
        atomic_io.write(Path(os.path.abspath(path)), proto.SerializeToString())
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    nodes = Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in proto.graph.node)
    return {"inputs": graph.inputs, "outputs": graph.outputs, "nodes": dict(nodes.most_common()), "difference": worst}


class Graph(nn.Module):
    """The model with the leaves of its state as separate inputs and outputs."""

    def __init__(self, model: Decoder | Attention):
        super().__init__()
        self.model, self.called = model, model.spec if isinstance(model, Attention) else model.config.attention
        paths, self.spec = pytree.tree_flatten_with_path(model.init_state(1, 0))
        self.names = [_name(path) for path, _ in paths]
        self.shapes = [tuple(leaf.shape) for _, leaf in paths]
        self.first = "tokens" if isinstance(model, Decoder) else "x"
        self.inputs = [self.first, *(f"state.{name}" for name in self.names)]
        self.outputs = ["outputs" if isinstance(model, Decoder) else "y", *(f"next.{name}" for name in self.names)]

    def forward(self, given: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        y, end = self.model(given, pytree.tree_unflatten(list(state), self.spec))
        return y, *pytree.tree_leaves(end)

    def example(self, rows: int, tokens: int, before: int = BEFORE) -> tuple[Tensor, ...]:
        """Return random input, and the leaves of a state that has read ``before`` tokens."""
        state = self.model.init_state(rows)
        if before:
            _, state = self.model(self._given(rows, before), state)
        return self._given(rows, tokens), *pytree.tree_leaves(state)

    def _given(self, rows: int, tokens: int) -> Tensor:
        if isinstance(self.model, Decoder):
            return torch.randint(self.model.start + 1, (rows, tokens))
        return torch.randn(rows, tokens, self.model.dim)

    def free(self, state: tuple[Tensor, ...]) -> dict[str, Any]:
        """Return the free dimensions for torch.export, given a state that has read tokens."""
        batch, tokens = Dim("B", min=1), Dim("N", min=1)
        # Keys and values of a layer have the same number of slots.
        slots = {name.rpartition(".")[0]: Dim(f"M{i}", min=0) for i, name in enumerate(self.names)}
        grown = [
            [i for i, size in enumerate(shape) if i and size != leaf.shape[i]]
            for shape, leaf in zip(self.shapes, state, strict=True)
        ]
        sizes = (
            {0: batch} | dict.fromkeys(which, slots[name.rpartition(".")[0]])
            for name, which in zip(self.names, grown, strict=True)
        )
        return {"given": {0: batch, 1: tokens}, "state": tuple(sizes)}

    def metadata(self) -> dict[str, str]:
        """Return the entries that a program needs to run the file."""
        shapes = {name: [-1, *shape[1:]] for name, shape in zip(self.inputs[1:], self.shapes, strict=True)}
        model, common = self.model, {"longspan": VERSION, "state": json.dumps(shapes)}
        if isinstance(model, Decoder):
            return common | {"start": str(model.start), "config": json.dumps(model.config.to_dict())}
        return common | {"attention": model.spec, "heads": str(model.heads)}


def _check(model: Any) -> None:
    if not isinstance(model, Decoder | Attention):
        raise ValueError(f"export takes a Decoder or an attention, not {type(model).__name__}")
    if isinstance(model, Attention) and not model.causal:
        raise ValueError(f"{model.name} with causal=False has no step; build it with causal=True to export it")
    if packed := [name for name, module in model.named_modules() if isinstance(module, Quantized)]:
        raise ValueError(f"{packed[0]} has quantized weights; export the model as it was before quantize()")
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and (tensor.dtype != torch.float32 or tensor.device.type != "cpu"):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}; export takes float32 on the CPU: model.float().cpu()"
            )


def _name(path: tuple) -> str:
    parts = (getattr(key, "name", getattr(key, "idx", getattr(key, "key", key))) for key in path)
    return ".".join(str(part) for part in parts if part != "layers")


def _proto(graph: Graph, domain: str) -> Any:
    """Return the content of the file."""
    import onnx

    given, token = graph.example(2, 7), operator.domain.set(domain)
    with _quiet():
        try:
            program = torch.onnx.export(
                graph,
                given,
                dynamo=True,
                dynamic_shapes=graph.free(given[1:]),
                input_names=graph.inputs,
                output_names=graph.outputs,
                verbose=False,
                opset_version=OPSET if domain == "ai.onnx" else None,
            )
        except Exception as error:
            # torch's message has many pages, and the cause comes first.
            cause = " ".join(str(error.__cause__ or error).split())[:400]
            raise ValueError(f"{graph.called} cannot be exported: {cause}") from error
        finally:
            operator.domain.reset(token)
    assert program is not None
    proto = program.model_proto
    if domain == "ai.onnx":
        # The converter does not reach this opset. No operator of the graph has changed up to it.
        del proto.opset_import[:]
        proto.opset_import.extend([onnx.helper.make_opsetid("", OPSET)])
    proto.producer_name, proto.producer_version = "longspan", VERSION
    onnx.helper.set_model_props(proto, graph.metadata())
    for value in proto.graph.input:
        sizes = value.type.tensor_type.shape.dim[: 2 if value.name == graph.first else 1]
        if fixed := [what for what, size in zip(("rows", "tokens"), sizes, strict=False) if not size.dim_param]:
            raise ValueError(
                f"{graph.called} cannot be exported: the graph fixes the number of {fixed[0]} in {value.name}, "
                "which must be free"
            )
    return proto


def _compare(graph: Graph, content: bytes) -> float:
    """Return the largest difference between the model and onnxruntime; raise ValueError if it is too large."""
    import onnxruntime  # pyright: ignore[reportMissingImports] (an optional package)

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    config, worst = getattr(graph.model, "config", None), 0.0
    most = config.length if config is not None and config.positions == "learned" else LENGTHS[-1] + BEFORE
    for tokens in LENGTHS:
        for before in (0, BEFORE):
            given = graph.example(ROWS, max(1, min(tokens, most - before)), before)
            named = {name: t.numpy() for name, t in zip(graph.inputs, given, strict=True)}
            for name, ours, theirs in zip(graph.outputs, graph(*given), session.run(None, named), strict=True):
                off = 0.0
                if ours.numel():
                    off = float((ours - torch.as_tensor(theirs)).abs().max() / ours.abs().max().clamp(min=1.0))
                if not off <= TOLERANCE:
                    raise ValueError(
                        f"onnxruntime's {name} differs from the model's by {off:.1e} at {tokens} tokens after "
                        f"{before}; the limit is {TOLERANCE:.0e}"
                    )
                worst = max(worst, off)
    return worst


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the output of torch and its exporter."""
    logs = {name: logging.getLogger(name).level for name in ("torch.onnx", "onnxscript")}
    for name in logs:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in logs.items():
            logging.getLogger(name).setLevel(level)
