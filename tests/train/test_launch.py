"""How the processes of a training were started: what does not fit is refused before anything is written."""

import contextlib
import os
import subprocess
import sys

import pytest

from longspan._utils import signals
from longspan.cli import entry
from longspan.cli.entry import main
from longspan.train import fit, launch
from training_process import HANGS, TINY, tiny

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
TORCHRUN |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "train"}
MODEL = [f"--model.{name}={value}" for name, value in TINY.to_dict().items()]


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in os.environ:
        if name.startswith(("TORCHELASTIC", "SLURM")) or name in launch.COUNTED:
            monkeypatch.delenv(name)


def put(monkeypatch, *environments, **more):
    for environment in (*environments, more):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "devices", "message"),
    [
        (TORCHRUN, 1, "torchrun started 2 processes, but run.devices is 1; set run.devices=2"),
        (TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"}, 1, "torchrun started 2 processes"),
        (
            TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
            2,
            "torchrun started 1 process, but run.devices is 2",
        ),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, 2, "1 on each machine, but run.devices is 2; set run.devices=1 and"),
        (
            TORCHRUN | {"WORLD_SIZE": "6"},
            2,
            "torchrun started 6 processes, but run.devices is 2; set run.devices=2 and",
        ),
        (
            SLURM | {"SLURM_NNODES": "2"},
            2,
            "1 on each machine, but run.devices is 2; set run.devices=1 and run.nodes=2",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 1, "mpirun started 2 processes, which a training cannot use"),
        ({"PMI_SIZE": "2"}, 2, "mpirun started 2 processes, which a training cannot use"),
        ({"RANK": "1"}, 1, "RANK=1 in the environment must be below 1 for run.devices=1 and run.nodes=1; unset RANK"),
        ({"NODE_RANK": "1"}, 2, "NODE_RANK=1 in the environment must be below 1"),
        ({"LOCAL_RANK": "0"}, 2, "LOCAL_RANK is set in the environment, but WORLD_SIZE is not"),
        (SLURM, 1, "srun started 2 processes, but run.devices is 1"),
        (SLURM | {"SLURM_PROCID": "1"}, 1, "srun started 2 processes"),
        (SLURM | {"SLURM_NTASKS": "1"}, 2, "srun started 1 process, but run.devices is 2"),
        ({"WORLD_SIZE": "4", "RANK": "0"}, 1, "the launcher that set WORLD_SIZE started 4 processes"),
        ({"RANK": ""}, 1, "RANK='' in the environment is not an integer; unset RANK"),
        ({"LOCAL_RANK": ""}, 1, "LOCAL_RANK='' in the environment is not an integer"),
        ({"RANK": "-1"}, 1, "RANK='-1' in the environment"),
        ({"LOCAL_RANK": "first"}, 1, "LOCAL_RANK='first' in the environment"),
        ({"WORLD_SIZE": "two"}, 1, "WORLD_SIZE='two' in the environment"),
        ({"SLURM_NTASKS": "", "SLURM_PROCID": "0"}, 1, "SLURM_NTASKS='' in the environment"),
    ],
)
def test_other_processes_than_devices_are_refused_before_anything_is_written(
    environment, devices, message, monkeypatch, tmp_path, capsys
):
    put(monkeypatch, environment)
    with pytest.raises(ValueError, match=message):
        fit(TINY, tiny(tmp_path, devices=devices), progress=False)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *MODEL, f"--run.devices={devices}", "--run.out=run"]) == entry.WRONG
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, 1),
        ({}, 2),
        (TORCHRUN, 2),
        (TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, 1),
        (SLURM, 2),
        (SLURM | {"SLURM_NTASKS": "1"}, 1),
        (SLURM | {"SLURM_JOB_NAME": "interactive"}, 1),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 2),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}, 2),  # a process that Lightning has started
    ],
)
def test_as_many_processes_as_devices_are_served(environment, devices, monkeypatch):
    put(monkeypatch, environment)
    launch.check(devices)


@pytest.mark.parametrize(
    ("environment", "devices", "nodes", "message"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, 1, 2, ""),
        (SLURM | {"SLURM_NNODES": "2"}, 1, 2, ""),
        ({"MASTER_ADDR": "here", "NODE_RANK": "1"}, 2, 2, ""),
        (
            TORCHRUN,
            1,
            2,
            "2 on each machine, but run.devices is 1 and run.nodes is 2; set run.devices=2 and run.nodes=1",
        ),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, 2, 2, "started 2 processes, but run.devices is 2 and run.nodes is 2"),
        ({}, 2, 2, "run.nodes=2 requires a launcher on each machine"),
        ({"MASTER_ADDR": "here", "NODE_RANK": "2"}, 2, 2, "NODE_RANK=2 in the environment must be below 2"),
    ],
)
def test_several_machines(environment, devices, nodes, message, monkeypatch):
    put(monkeypatch, environment)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        launch.check(devices, nodes)


@pytest.mark.parametrize(
    ("environment", "leads"),
    [
        ({}, True),
        ({"RANK": ""}, True),
        ({"LOCAL_RANK": "first"}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "2", "LOCAL_RANK": "0"}, False),
        ({"RANK": "0", "LOCAL_RANK": "1"}, False),
        ({"NODE_RANK": "1"}, False),
        (SLURM, True),
        (SLURM | {"SLURM_PROCID": "1"}, False),
        (SLURM | {"SLURM_PROCID": "1", "SLURM_JOB_NAME": "bash"}, True),
    ],
)
def test_one_process_leads(environment, leads, monkeypatch):
    put(monkeypatch, environment)
    assert launch.first() == leads
    assert signals.first_rank() == (leads or bool({"SLURM_PROCID", "NODE_RANK"} & set(environment)))


@pytest.mark.slow
def test_torchrun_refuses_with_one_device_and_trains_with_two(tmp_path):
    words = [*MODEL, "--run.steps=2", "--run.batch=3", "--run.evaluate_examples=2"]
    begin = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "longspan"]
    for devices, code in (("1", 1), ("2", 0)):
        command = [*begin, "train", *words, f"--run.devices={devices}", f"--run.out={tmp_path / devices}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS)
        assert done.returncode == code, done.stderr
        assert (tmp_path / devices).exists() == (devices == "2")
        assert ("torchrun started 2 processes, but run.devices is 1" in done.stderr) == (devices == "1")
