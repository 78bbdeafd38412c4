"""What must hold for every model of flash-linear-attention: states, padding, packed rows, generation, files."""

import copy

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspan.compat.fla import models

IDS = torch.arange(2 * 23).view(2, 23) * 7 % 41
TOLERANCE = 2e-5  # float32, of logits of order 1


def build(model_type, seed=0, **options):
    """A small model with random weights, in evaluation mode."""
    family = models.supported()[model_type]
    torch.manual_seed(seed)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 41, "intermediate_size": 48}
    model = family.model(family.config(**(small | options))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights and biases other than 1 and 0, so that a forgotten one is seen.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    error = (actual - expected).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), error


def cache_of(output):
    return output.cache if "cache" in output else output.past_key_values


def continued(model):
    """A prompt in two parts, and token by token, equals the whole."""
    with torch.no_grad():
        whole = model(IDS).logits
        first = model(IDS[:, :9], use_cache=True)
        close(first.logits, whole[:, :9])
        past = cache_of(first)
        branch = copy.deepcopy(past)
        close(model(IDS[:, 9:], cache=past).logits, whole[:, 9:])
        for i in range(9, 14):
            close(model(IDS[:, i : i + 1], cache=branch).logits[:, 0], whole[:, i])


def padded(model):
    """Padding on either side changes no logits of real tokens, and no later ones."""
    with torch.no_grad():
        alone = model(IDS[:1, :17]).logits
        for left in (True, False):
            pad = torch.full((1, 6), 3)
            ids = torch.cat([pad, IDS[:1, :17]] if left else [IDS[:1, :17], pad], 1)
            mask = torch.ones_like(ids)
            hidden = slice(0, 6) if left else slice(17, 23)
            mask[:, hidden] = 0
            both, masks = torch.cat([ids, IDS[1:]]), torch.cat([mask, torch.ones_like(mask)])
            found = model(both, attention_mask=masks, use_cache=True)
            close(found.logits[:1, 6:] if left else found.logits[:1, :17], alone)
            close(found.logits[1:], model(IDS[1:]).logits)
            more = model(IDS[:, :2], cache=cache_of(found), attention_mask=torch.cat([masks, torch.ones(2, 2)], 1))
            close(more.logits[:1], model(torch.cat([IDS[:1, :17], IDS[:1, :2]], 1)).logits[:, 17:])


def packed(model):
    """Packed sequences see only themselves, in values and gradients."""
    positions = torch.cat([torch.arange(8), torch.arange(15)])[None]
    alone = torch.cat([model(IDS[:1, :8]).logits, model(IDS[:1, 8:]).logits], 1)
    close(model(IDS[:1], position_ids=positions).logits, alone)
    embedded = model.get_input_embeddings()(IDS[:1]).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, position_ids=positions).logits
    (grad,) = torch.autograd.grad(logits[:, 8:].square().sum(), embedded)
    assert grad[:, :8].abs().max() == 0
    assert grad[:, 8:].abs().max() > 0


def generates(model):
    """Greedy and beam search with the cache equal those without."""
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    for beams in (1, 3):
        found = [model.generate(IDS, use_cache=cache, num_beams=beams, **options) for cache in (True, False)]
        assert torch.equal(*found)


def trains(model):
    """Every parameter has a gradient."""
    model.train()
    model(IDS, labels=IDS).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    model.zero_grad()
    model.eval()
    assert missing == []


def saved(model, folder):
    """Saved and loaded again, the model and its config are the same."""
    model.save_pretrained(folder)
    loaded = models.load(folder)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    before, after = model.config.to_dict(), loaded.config.to_dict()
    after["_name_or_path"] = before["_name_or_path"]
    assert after == before


def named_early(model, folder):
    """A checkpoint with the early name of the embedding is read."""
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    stored["backbone.embedding.weight"] = stored.pop("backbone.embeddings.weight")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        assert torch.equal(models.load(folder)(IDS).logits, model(IDS).logits)


LAWS = (continued, padded, packed, generates, trains)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution of each channel: x (...,N,C), weight (C,1,K)."""
    taps, n = weight.shape[-1], x.shape[-2]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    return sum((padded[..., j : j + n, :] * weight[:, 0, j] for j in range(taps)), x.new_zeros(()))


def rms(x, eps, weight):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
