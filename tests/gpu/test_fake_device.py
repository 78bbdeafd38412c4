"""What mechanisms would ask of a GPU, counted on a fake one: launches, waits for the device, uploads, mixed devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import longspan
from gpu import fake

pytestmark = pytest.mark.skipif(not fake.available(), reason="the fake device needs torch 2.13")

SPECS = [longspan.mechanism_examples(name)[0] for name in longspan.list_mechanisms()]

# Launches of a step and of 29 tokens forward and backward, in PyTorch: limits, which may only fall.
RECURRENT = {
    "average": (19, 30, 17),
    "compressive": (138, 115, 47),
    "deltanet": (37, 86, 208),
    "fast_weights": (38, 85, 195),
    "fourier": (30, 43, 90),
    "gated_deltanet": (49, 114, 267),
    "gla": (23, 101, 304),
    "infini": (89, 48, 76),
    "kda": (50, 222, 699),
    "linear": (20, 29, 38),
    "local": (37, 26, 66),
    "luna": (24, 46, 110),
    "performer": (50, 85, 138),
    "polynomial": (41, 45, 50),
    "retention": (51, 84, 140),
    "rfa": (40, 53, 115),
    "ssd": (39, 71, 175),
    "transformer_xl": (47, 44, 29),
}

# Waits of a step for the device; 0 for all others. They may only fall.
SYNCS = {
    "alibi": 1,
    "axial": 1,
    "bigbird": 1,
    "bp": 1,
    "dsa": 2,
    "exact_topk": 1,
    "forgetting": 2,
    "gaussian": 1,
    "informer": 2,
    "kernel": 1,
    "lowrank_band": 1,
    "memory_compressed": 4,
    "moba": 1,
    "nsa": 1,
    "path": 1,
    "realformer": 1,
    "relative": 1,
    "sac": 2,
    "sinkhorn": 1,
    "softmax": 1,
    "sparse_transformer": 1,
    "stick_breaking": 1,
    "synthesizer": 1,
    "talking_heads": 1,
}

# Uploads of a step, which a CUDA graph cannot capture; 0 for all others. They may only fall.
UPLOADS = {
    "bp": 1,
}


@pytest.fixture(scope="session")
def measured(request):
    """The counts of all specs that this run tests, from one process."""
    here = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    return fake.measure(sorted({item.callspec.params["spec"] for item in here if "spec" in item.callspec.params}))


@pytest.mark.parametrize("spec", SPECS)
def test_no_call_mixes_devices(spec, measured):
    assert measured[spec]
    assert {event: cost["error"] for event, cost in measured[spec].items() if cost["error"]} == {}


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_waits_and_uploads_no_more_than_before(spec, measured):
    name = spec.partition("(")[0]
    for event in {"step", "donated"} & measured[spec].keys():
        cost = measured[spec][event]
        assert len(cost["syncs"]) <= SYNCS.get(name, 0), (event, cost["syncs"])
        assert len(cost["uploads"]) <= UPLOADS.get(name, 0), (event, cost["uploads"])


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.partition("(")[0] in RECURRENT])
def test_a_recurrent_mechanism_launches_no_more_than_before(spec, measured):
    limits = dict(zip(("step", "forward", "backward"), RECURRENT[spec.partition("(")[0]], strict=True))
    found = {event: measured[spec][event]["launches"] for event in limits}
    assert all(found[event] <= limits[event] for event in limits), (found, limits)


PLANTED = """
import fake, json, torch
with fake.accelerator() as count:
    x = torch.ones(3, device=fake.DEVICE)
    y = torch.tensor([1.0, 2.0, 3.0], device=fake.DEVICE)
    before = count.launches
    _ = float((x * y).sum())
    mixed = fake.counted(count, lambda: x + torch.ones(3))[0]["error"]
    kept = fake.counted(count, lambda: x[x > 0].tolist())[0]
    print(json.dumps([before, mixed, kept]))
"""


def test_planted_faults_are_counted():
    command = [sys.executable, "-c", PLANTED]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    before, mixed, kept = json.loads(done.stdout)
    assert before == 2, "a fill and an upload"
    assert "fakegpu" in mixed
    assert "cpu" in mixed
    assert (kept["launches"], len(kept["syncs"])) == (3, 2), "a comparison, nonzero, a gather; nonzero and tolist wait"
