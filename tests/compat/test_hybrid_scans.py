"""Model types whose recurrence is a scan by channel: kernels, padding at either end, and lengths."""

import pytest
import torch

from hybrids import SCANS, halved, judge, model, served, tokens
from longspan.compat import transformers as on_cpu
from longspan.ops.native import build

LENGTHS = (8, 80)  # less and more than the kernels' chunks


@pytest.fixture(autouse=True)
def restored():
    """Nothing stays replaced after a test."""
    yield
    on_cpu.restore()


def far(a, b):
    """The largest difference over the largest number of b."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))


def hidden(n, end):
    """A mask (3,N) that hides tokens of two rows at one end."""
    mask = torch.ones(3, n, dtype=torch.long)
    for row, count in ((1, 3), (2, n - 2)):
        mask[row, :count] = 0
    return mask.flip(1) if end == "right" else mask


def compared(kind, x, **given):
    """Logits and gradients of the loss, by the original code and by ours."""
    made, found = model(kind), []
    for ours in (False, True):
        if ours:
            on_cpu.accelerate(made)
        made.zero_grad()
        out = made(input_ids=x, labels=x, use_cache=False, **given)
        out.loss.backward()
        grads = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
        found.append((out.logits.detach(), grads))
    return found


@pytest.mark.parametrize("kind", SCANS)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("end", ["none", "left", "right"])
def test_logits_and_gradients_are_those_of_the_original_code(kind, n, end):
    served(kind)
    given = {} if end == "none" else {"attention_mask": hidden(n, end)}
    (logits, grads), (ours, found) = compared(kind, tokens(3, n), **given)
    assert far(ours, logits) < 1e-5
    assert found.keys() == grads.keys()
    largest = max(float(g.abs().max()) for g in grads.values())
    for name, wanted in grads.items():
        assert float((found[name] - wanted).abs().max()) < 1e-5 * largest, name


@pytest.mark.parametrize("kind", SCANS)
def test_native_kernels_serve_training_and_steps(kind):
    served(kind)
    if build.loaded("scan") is None:
        pytest.skip("no native kernels here")
    made, x = model(kind), tokens(2, 11)
    on_cpu.accelerate(made)
    made(x, labels=x, use_cache=False).loss.backward()
    made.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)
    found = on_cpu.status().functions[kind]
    assert sum(n for by in found.values() for n in by.values()) >= 6
    assert all(what.startswith("native (") for by in found.values() for what in by)


@pytest.mark.parametrize("kind", SCANS)
def test_half_precision_trains_as_near_to_float64_as_the_original_code(kind):
    served(kind)
    made, x = halved(model(kind), torch.bfloat16), tokens(2, 40)
    exact = judge(kind, made)
    exact(x, labels=x, use_cache=False).loss.backward()
    right = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    errors = []
    for ours in (False, True):
        if ours:
            on_cpu.accelerate(made)
        made.zero_grad()
        made(x, labels=x, use_cache=False).loss.backward()
        grad = torch.cat([p.grad.double().flatten() for p in made.parameters() if p.grad is not None])
        errors.append(float((grad - right).norm() / right.norm()))
    assert errors[1] < 1.15 * errors[0]
