"""Two processes of accelerate and of torchrun train a decoder of transformers as one process does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TESTS = Path(__file__).parents[1]
LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]
FSDP = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
UNITS = ["", "decoder.embedding.tokens", "decoder.stack.blocks.0", "decoder.stack.blocks.1", "decoder.head"]


def run(command, job, folder):
    """What a job of ``hub_process`` returned on the first process."""
    paths = os.pathsep.join([str(Path(longspan.__file__).parents[1]), str(TESTS)])
    done = subprocess.run(
        [*command, str(TESTS / "hub_process.py"), job, str(folder)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


def check(found):
    # The loss is float32.
    assert found["losses"] < 2e-6
    for name in ("weights", "loaded", "resumed weights", "saved"):
        assert found[name] < 1e-12, name
    assert found["resumed"] == 0
    assert found["generated"] == 0
    assert found["type"] == "torch.float64"


# As the trainer below, which wraps the model in the same way.
@pytest.mark.slow
def test_data_parallel_equals_one_process(tmp_path):
    found = run([*LAUNCH, "--multi_gpu"], "replicated", tmp_path)
    check(found)
    assert found["shards"] == 0


@pytest.mark.parametrize(
    ("job", "kind", "efficient"),
    [
        pytest.param("sharded", "SHARDED_STATE_DICT", "true", marks=pytest.mark.slow),
        pytest.param("sharded", "FULL_STATE_DICT", "false", marks=pytest.mark.slow),
        pytest.param("tied", "FULL_STATE_DICT", "true", marks=pytest.mark.slow),
        ("tied", "SHARDED_STATE_DICT", "true"),
    ],
)
def test_sharded_equals_one_process(job, kind, efficient, tmp_path):
    options = ["--fsdp_state_dict_type", kind, "--fsdp_cpu_ram_efficient_loading", efficient]
    found = run([*LAUNCH, *FSDP, *options], job, tmp_path)
    check(found)
    assert found["shards"] == 1
    assert found["units"] == UNITS


def test_buffers_are_not_sharded(tmp_path):
    """The random rows of performer; accelerate's efficient loading does not support buffers."""
    check(run([*LAUNCH, *FSDP, "--fsdp_cpu_ram_efficient_loading", "false"], "buffers", tmp_path))


@pytest.mark.parametrize(
    "job",
    ["trainer", *(pytest.param(f"sharded_trainer_{loss}", marks=pytest.mark.slow) for loss in ("plain", "smoothed"))],
)
def test_trainer_on_two_processes_equals_one(job, tmp_path):
    """Losses, weights, a checkpoint from which it resumes, and the saved model."""
    sharded = job != "trainer"
    found = run([*LAUNCH, *FSDP, "--fsdp_state_dict_type", "FULL_STATE_DICT"] if sharded else TORCHRUN, job, tmp_path)
    assert found["processes"] == 2
    assert found["shards"] == sharded
    assert found["moved"] > 1e-3
    # The loss is float32.
    assert found["losses"] < 2e-6
    assert found["weights"] < 1e-6
    assert found["saved"] == 0
    assert found.get("resumed", 0) < 1e-12
