"""Definitions in float64, and whether a candidate agrees with them: no figure is printed of one that does not."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspan.models.config import DecoderConfig
from longspan.ops.backends import backend

from . import local
from .candidates import Candidate, Refused
from .worker import Task

ALLOWED = {"float32": 1e-4, "bfloat16": 3e-2}  # relative, in the Euclidean norm
COMPARED = 67  # tokens of the real length that are compared
SMALL = {"batch": 2, "length": 37, "heads": 3, "size": 5}
MAPS = {
    "elu": lambda x: torch.where(x > 0, x + 1, x.exp()),
    "relu": lambda x: x * (x > 0),
    "squared_relu": lambda x: x * x * (x > 0),
    "exp": lambda x: x.clamp(max=30.0).exp(),
}


def linear(q: Tensor, k: Tensor, v: Tensor, *, feature_map: str = "elu", eps: float = 1e-6) -> Tensor:
    """Causal linear attention as the N x N matrix that it never forms; (B,N,H,D) each -> (B,N,H,D).

    Source: Katharopoulos et al. 2020, eq. 4.
    """
    phi = MAPS[feature_map]
    weights = torch.einsum("bnhd,bmhd->bhnm", phi(q), phi(k)).tril()
    return torch.einsum("bhnm,bmhd->bnhd", weights / (weights.sum(-1, keepdim=True) + eps), v)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention; (B,N,H,D) each -> (B,N,H,D). Source: Vaswani et al. 2017, eq. 1."""
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(q.shape[-1])
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhnm,bmhd->bnhd", logits.masked_fill(future, -math.inf).softmax(-1), v)


def decoder(config: DecoderConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """A decoder without positions over whole sequences: tokens (B,N) -> outputs (B,N,vocab), in float64.

    Of linear or softmax attention without options, GELU and layer norm. Source: Vaswani et al. 2017, section 3.1.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}

    def affine(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].mT + w[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        scaled = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attend(name: str, x: Tensor) -> Tensor:
        q, k, v = (affine(f"{name}.{part}", x).unflatten(2, (config.heads, -1)) for part in ("query", "key", "value"))
        return affine(f"{name}.out", {"linear": linear, "softmax": softmax}[config.attention](q, k, v).flatten(2))

    def feed(name: str, x: Tensor) -> Tensor:
        hidden = affine(f"{name}.expand", x)
        return affine(f"{name}.contract", hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2)

    x = w["embedding.tokens.weight"][tokens]
    for layer in (f"stack.blocks.{i}" for i in range(config.depth)):
        if config.prenorm:
            x = x + attend(f"{layer}.attention", norm(f"{layer}.norm1", x))
            x = x + feed(f"{layer}.feedforward", norm(f"{layer}.norm2", x))
        else:
            x = norm(f"{layer}.norm1", x + attend(f"{layer}.attention", x))
            x = norm(f"{layer}.norm2", x + feed(f"{layer}.feedforward", x))
    return affine("head", norm("stack.norm", x) if config.prenorm else x)


def check_attention(candidate: Candidate, name: local.Name, task: Task) -> dict[str, float]:
    """Compare at small odd sizes and on the first tokens of the real shape -> largest error of each part.

    Values, and with ``backward`` gradients, which must be zero after those tokens. Raises Refused.
    """
    errors: dict[str, float] = {}
    for sizes in (_small(name, task), {}):
        asked = task | sizes
        tokens = min(COMPARED, asked["length"])
        given = _random(asked, tokens)
        expected = _attention(name, asked, given)
        found = candidate.answer(asked, given)
        here = relative(found, expected)
        judge(here, ALLOWED[task["dtype"]], _shape(asked))
        errors = {part: max(errors.get(part, 0.0), error) for part, error in here.items()}
        if (leak := float(found.get("beyond", torch.zeros(())))) != 0:
            raise Refused(f"a token gets a gradient of {leak:.2g} from outputs before it, at {_shape(asked)}")
    return errors


def check_module(candidate: Candidate, make: Callable[[Task], Any], task: Task) -> dict[str, float]:
    """Compare a whole attention with its own reference in float64, on a short sequence -> error of each part.

    ``make``: task -> the attention. Raises Refused.
    """
    asked = task | {"length": min(COMPARED, task["length"])}
    given = _random(asked, asked["length"])
    errors = relative(candidate.answer(asked, given), _differentiated(asked, given, _reference(lambda: make(asked))))
    judge(errors, ALLOWED[task["dtype"]], _shape(asked))
    return errors


def _reference(make: Callable[[], Any]) -> Callable[..., Tensor]:
    """A mechanism's own reference: whatever it is, that is its definition, and the tests hold it to the laws."""

    def function(x: Tensor) -> Tensor:
        with backend("reference"):
            return make().double()(x)[0]

    return function


def _small(name: local.Name, task: Task) -> dict[str, int]:
    """Odd sizes; where a module has none such, as with rotary positions, a head of an even one. Raises Refused."""
    if not name.module:
        return SMALL
    try:
        local.module(name.spec, task | SMALL)
        return SMALL
    except ValueError:
        even = SMALL | {"size": SMALL["size"] + 1}
    try:
        local.module(name.spec, task | even)
    except ValueError as error:
        raise Refused(f"it cannot be built at {_shape(task | even)}: {error}") from error
    return even


def _attention(name: local.Name, task: Task, given: dict[str, Tensor]) -> dict[str, Tensor]:
    if name.module:
        return _differentiated(task, given, _reference(lambda: local.module(name.spec, task)))
    if name.spec == "sdpa":
        return _differentiated(task, given, lambda *inputs: softmax(*inputs).flatten(2))
    return _differentiated(task, given, lambda *inputs: linear(*inputs, **local.options(name.spec)).flatten(2))


def _differentiated(task: Task, given: dict[str, Tensor], function: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Its output in float64, and with backward the gradients."""
    inputs = [tensor.double().requires_grad_() for part, tensor in given.items() if part.startswith("input")]
    output = function(*inputs)
    if not task["backward"]:
        return {"output": output.detach()}
    grads = torch.autograd.grad(output, inputs, given["upstream"].double())
    return {"output": output.detach(), **{f"grad{i}": grad for i, grad in enumerate(grads)}}


def check_step(candidate: Candidate, options: dict[str, Any], task: Task, tokens: int = 5) -> float:
    """Compare some tokens, one after the other, at small odd sizes and on rows of the real batch -> largest error.

    ``options``: of ``linear``. Raises Refused.
    """
    worst = 0.0
    for sizes in (SMALL, {}):
        asked = task | sizes | {"backward": False}
        given = _random(asked | {"batch": min(asked["batch"], 2)}, tokens)
        expected = linear(*(tensor.double() for tensor in given.values()), **options)
        errors = relative(candidate.answer(asked, given), {"output": expected})
        judge(errors, ALLOWED[task["dtype"]], _shape(asked))
        worst = max(worst, *errors.values())
    return worst


def check_model(
    candidate: Candidate, config: DecoderConfig, weights: dict[str, Tensor], task: Task, tokens: int = 7
) -> float:
    """Compare a decoder's tokens, one after the other, on rows of the real batch -> error. Raises Refused."""
    rows = min(task["batch"], 2)
    given = torch.randint(config.vocab, (rows, tokens), generator=torch.Generator().manual_seed(0))
    found = candidate.answer(task, {"tokens": given, **weights})
    errors = relative(found, {"output": decoder(config, weights, given)})
    judge(errors, ALLOWED[task["dtype"]], f"batch {task['batch']}")
    return errors["output"]


def _random(task: Task, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (task["batch"], tokens, task["heads"], task["size"])
    if task.get("module"):
        shape = (*shape[:2], task["heads"] * task["size"])
    count = 1 if task.get("module") else 3
    dtype = getattr(torch, task["dtype"])
    given = {f"input{i}": torch.randn(shape, generator=generator).to(dtype) for i in range(count)}
    if task["backward"]:
        given["upstream"] = torch.randn(shape, generator=generator).to(dtype).flatten(2)
    return given


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """How far each part is off what is expected, in the Euclidean norm. Raises Refused for another shape."""
    errors = {}
    for part, truth in expected.items():
        if found[part].shape != truth.shape:
            raise Refused(f"its {part} is {tuple(found[part].shape)}, not {tuple(truth.shape)}")
        errors[part] = float((found[part].double() - truth).norm() / truth.norm())
    return errors


def judge(errors: dict[str, float], allowed: float, where: str) -> None:
    """Raise Refused for the first error that is too large; ``where`` it was found, in words."""
    for part, error in errors.items():
        # Written so that NaN fails.
        if not error <= allowed:
            raise Refused(f"its {part} is off the float64 definition by {error:.2g} at {where}; allowed {allowed}")


def _shape(task: Task) -> str:
    return f"B {task['batch']}, N {task['length']}, H {task['heads']}, D {task['size']}"
