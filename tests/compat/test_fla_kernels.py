"""Functions and models equal flash-linear-attention's own kernels, run by Triton's interpreter.

Their results are stored. They are also computed anew where flash-linear-attention and einops are installed, or where
``LONGSPAN_FLA_SOURCE`` holds the folders of both, separated as in ``PYTHONPATH``.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fla_original as original
import longspan
from longspan.attention.nsa import NSA
from longspan.compat.fla import models, ops
from longspan.compat.fla.models.families.rwkv6 import attend
from longspan.compat.fla.models.mixer import Call
from longspan.ops import softmax, sparse
from longspan.ops.gated import mesa, preconditioned, slots

NAMES = [*original.FUNCTIONS, *(f"naive-{name}" for name in original.NAIVE)]
TOLERANCE = 1e-5  # float32, of the largest value
STORED = Path(__file__).parent / "fla_original.npz"
SOURCE = os.environ.get("LONGSPAN_FLA_SOURCE", "")


def swapped(**tensors):
    """Tensors (B,T,H,channels) or (B,T,H) as (B,H,T,channels) or (B,H,T); others as they are."""
    return {name: t.transpose(1, 2) if t.dim() > 2 else t for name, t in tensors.items()}


def general(q, k, v, read, erase, g, state, **options):
    """``general_delta_rule`` in the original's layout."""
    named = swapped(query=q, key=k, value=v, read=read, erase=erase) | ({} if g is None else swapped(log_decay=g))
    out, end = longspan.general_delta_rule(
        **named, state=state, return_state=True, read_before_decay=g is not None, **options
    )
    return out.transpose(1, 2), end


def lightning(q, k, v, initial_state, layer_idx, num_layers):
    rates = (8 / original.H) * (1 - layer_idx / num_layers) * torch.arange(original.H)
    log_decay = (-rates)[:, None].expand(len(q), -1, q.shape[1])
    named = swapped(query=q, key=k, value=v)
    out, end = longspan.decay_attention(**named, log_decay=log_decay, state=initial_state, return_state=True)
    return out.transpose(1, 2), end


def rwkv6(r, k, v, w, u, initial_state, scale):
    out, end = attend(*swapped(r=r, k=k, v=v, w=w).values(), u, initial_state, Call())
    return out.transpose(1, 2) * scale, end


def comba(q, k, v, p, g, beta, initial_state):
    write = k * beta[..., None]
    return general(q, write, v, p, write, g, initial_state)


def rwkv7(r, w, k, v, kk, a, initial_state):
    return general(r, k, v, kk, kk * a, w, initial_state, scale=1.0)


def low_rank(q, k, v, a, b, initial_state, gk=None):
    return general(q, k, v, a, -b, gk, initial_state)


def hgrn(x, g, initial_state):
    return longspan.diagonal_scan(x, g, state=initial_state, return_state=True)


def no_state(function):
    """A function of tensors (B,H,T,channels), in the original's layout."""

    def run(**tensors):
        return function(**swapped(**tensors)).transpose(1, 2)

    return run


def positions(q):
    return torch.arange(q.shape[2]).expand(len(q), -1)


def forgetting(q, k, v, g):
    return softmax.forgetting.attend(q, k, v, g.double().cumsum(2))


def abc(q, k, v, s):
    write, log_decay, _ = slots.running_softmax(s, s.new_full((*s.shape[:2], s.shape[3]), slots.NOTHING), None, None)
    return slots.attend(q, k, v, write, log_decay=log_decay)[0]


def mesa_net(q, k, v, g, beta, lamb):
    state = q.new_zeros(*q.shape[:2], q.shape[3], 2 * q.shape[3])
    return mesa.attend(q, k, v, beta=beta, log_decay=g, ridge=lamb.square() + 0.25, steps=30, state=state)[0]


def preconditioned_rule(q, k, v, g, g_atk, beta, beta_atk):
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    sums, curvature = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), q.new_zeros(*q.shape[:2], q.shape[3])
    given = {"beta": beta, "log_decay": g, "weight": beta_atk.mT, "log_fade": g_atk.mT}
    center = torch.full((q.shape[1],), -0.2)
    return preconditioned.attend(q, k, v, **given, center=center, span=1.5, state=(sums, curvature))[0]


def dsa(q, k, v, a, b, w):
    # The indexer's tensors have other layouts.
    index = sparse.picked.choose(a.transpose(1, 2), b.transpose(1, 2), w.mT, positions(q), original.TOP)
    return sparse.chosen.attend(q, k, v, positions(q), index[:, None], 1) + 0 * (a.sum() + b.sum() + w.sum())


def nsa_choice(q, k):
    module = NSA(q.shape[1] * q.shape[3], q.shape[1], block=original.BLOCK, top=original.TOP)
    own = torch.nn.functional.pad(blocked(k), (0, 0, 0, k.shape[2] % original.BLOCK))
    found = module._choose(q, own * original.BLOCK, positions(q))
    return found.masked_fill(found < 0, own.shape[2]).sort(-1).values.float()


def nsa_best(q, k, v):
    blocks = nsa_choice(q, k).long()
    blocks = blocks.masked_fill(blocks * original.BLOCK >= k.shape[2], -1)
    return sparse.chosen.attend(q, k, v, positions(q), blocks, original.BLOCK)


def nsa_summary(q, k, v):
    keys, values = blocked(k), blocked(v)
    every = torch.zeros(1, 1, 1, 1, dtype=torch.long).expand(len(q), q.shape[1], q.shape[2], 1)
    return sparse.chosen.attend(q, keys, values, (positions(q) + 1) // original.BLOCK - 1, every, keys.shape[2])


def blocked(x):
    return original.means(x.transpose(1, 2)).transpose(1, 2)


NAIVE = {
    "forgetting": forgetting,
    "path": lambda q, k, v, w, beta: softmax.path.attend(q, k, v, w, 2 * beta)[0],
    "stick_breaking": softmax.stick_breaking.attend,
    "stick_breaking-current": lambda **tensors: softmax.stick_breaking.attend(**tensors, current=True),
    "gsa": lambda q, k, v, s, g: slots.attend(q, k, v, s, log_decay=g)[0],
    "abc": abc,
    "mesa": mesa_net,
    "preconditioned": preconditioned_rule,
    "dsa": dsa,
    "nsa-summary": nsa_summary,
    "nsa-choice": nsa_choice,
    "nsa-best": nsa_best,
}
OURS = {
    "lightning": lightning,
    "rwkv6": rwkv6,
    "comba": comba,
    "rwkv7": rwkv7,
    "iplr": low_rank,
    "dplr": low_rank,
    "hgrn": hgrn,
}


def ours(name, leaves, options):
    """The outputs and last states of the function of longspan that equals one of the original."""
    if name in OURS:
        return OURS[name](**leaves, **options)
    function = getattr(ops, original.FUNCTIONS[name].name)
    return function(**leaves, **options, output_final_state=True)


@pytest.fixture(scope="module")
def stored():
    with np.load(STORED) as found:
        return {name: torch.from_numpy(found[name]) for name in found.files}


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """Results of the original, from its source, with heads of 16 channels."""
    if not SOURCE and not all(importlib.util.find_spec(name) for name in ("fla", "einops", "triton")):
        pytest.skip("needs LONGSPAN_FLA_SOURCE, or fla installed")
    path = tmp_path_factory.mktemp("original") / "results.npz"
    paths = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, "-W", "ignore", original.__file__, str(path), "16", "16"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        timeout=600,
    )
    with np.load(path) as found:
        return {name: torch.from_numpy(found[name]) for name in found.files}


def error(found, expected):
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / max(1.0, expected.abs().max().item())).item()


def function_errors(name, keys, values, results):
    case = original.FUNCTIONS.get(name) or original.NAIVE[name.removeprefix("naive-")]
    leaves = original.arguments(case, original.operands(keys, values))
    if isinstance(case, original.Naive):
        out, end = no_state(NAIVE[name.removeprefix("naive-")])(**leaves), ()
    else:
        out, end = ours(name, leaves, case.options)
    found = dict(original.results(case, out, end, leaves))
    expected = {part.partition("/")[2]: value for part, value in results.items() if part.startswith(f"{name}/")}
    assert found.keys() == expected.keys()
    return {part: error(value, expected[part]) for part, value in found.items()}


def model_errors(case, results):
    name, options = original.model_cases()[case]
    family = models.supported()[name]
    model = original.fill(family.model(family.config(**options)))
    with torch.no_grad():
        return {"logits": error(model(original.ids(name)).logits, results[f"model-{case}/logits"])}


def within(errors):
    assert {part: value for part, value in errors.items() if not value <= TOLERANCE} == {}


@pytest.mark.whole
@pytest.mark.parametrize("name", NAMES)
def test_functions_equal_the_stored_results(name, stored):
    within(function_errors(name, *original.SIZES, stored))


@pytest.mark.whole
def test_linear_attention_equals_the_stored_result(stored):
    """Its epsilon is another one, below the tolerance here."""
    leaves = original.arguments(original.FUNCTIONS["linear_attn-normalized"], original.operands(*original.SIZES))
    out = longspan.linear_attention(*swapped(**leaves).values(), feature_map="relu").transpose(1, 2)
    within({"out": error(out, stored["linear_attn-normalized/out"])})


@pytest.mark.whole
@pytest.mark.parametrize("case", original.model_cases())
def test_models_equal_the_stored_results(case, stored):
    within(model_errors(case, stored))


@pytest.mark.whole
def test_every_stored_result_is_compared(stored):
    cases = {*NAMES, *(f"model-{case}" for case in original.model_cases())}
    assert {part.rpartition("/")[0] for part in stored} == cases


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_functions_equal_the_original(name, computed):
    within(function_errors(name, 16, 16, computed))


@pytest.mark.full
@pytest.mark.parametrize("case", original.model_cases())
def test_models_equal_the_original(case, computed):
    within(model_errors(case, computed))


@pytest.mark.full
def test_the_stored_results_are_those_of_the_original(computed, stored):
    within({part: error(stored[part], computed[part]) for part in stored if part.endswith("logits")})
