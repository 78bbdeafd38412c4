"""Detect how the processes of a training were started: by Lightning, torchrun or SLURM."""

import os

from .._utils import signals

# Whole numbers that launchers set for each process.
COUNTED = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_NNODES",
    "JSM_NAMESPACE_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
)
# Lightning ignores SLURM in jobs with these names.
INTERACTIVE = ("bash", "interactive")


def check(devices: int, nodes: int = 1) -> None:
    """Raise ValueError unless the environment fits a run on ``devices`` devices of each of ``nodes`` machines.

    Otherwise several independent processes could write into one folder.
    """
    for name in COUNTED:
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdigit()):
            raise ValueError(
                f"{name}={value!r} in the environment is not an integer; unset {name}, or start "
                "the command with torchrun"
            )
    world, has = devices * nodes, f"run.devices is {devices}" + (f" and run.nodes is {nodes}" if nodes > 1 else "")
    launcher, count = _started()
    if launcher == "mpirun" and count > 1:
        raise ValueError(f"mpirun started {count} processes, which a training cannot use; start them with torchrun")
    local = _local(launcher, count)
    if count != world and (count > 1 or launcher in ("torchrun", "srun")):
        fit = f"run.devices={count}" if local in (0, count) else f"run.devices={local} and run.nodes={count // local}"
        raise ValueError(
            f"{launcher} started {count} {'processes' if count > 1 else 'process'}, but {has}; set "
            f"{fit}, or start one process without {launcher}"
        )
    if count > 1 and local not in (0, devices):
        raise ValueError(
            f"{launcher} started {count} processes, {local} on each machine, but {has}; set run.devices={local} and "
            f"run.nodes={count // local}"
        )
    if nodes > 1 and count == 1 and not {"MASTER_ADDR", "NODE_RANK"} <= set(os.environ):
        raise ValueError(
            f"run.nodes={nodes} requires a launcher on each machine: start the command with torchrun or srun, or set "
            "MASTER_ADDR, MASTER_PORT and NODE_RANK"
        )
    _check_rank(world, devices, nodes)


def _check_rank(world: int, devices: int, nodes: int) -> None:
    """Raise ValueError for the number of a process that the run does not have: it would be a second training."""
    limits = {"RANK": world, "LOCAL_RANK": devices, "NODE_RANK": nodes}
    for name, limit in (limits | ({"SLURM_PROCID": world} if _slurm() else {})).items():
        if (number := signals.rank(name)) >= limit:
            raise ValueError(
                f"{name}={number} in the environment must be below {limit} for run.devices={devices} and "
                f"run.nodes={nodes}; unset {name}, or start the command with torchrun"
            )
    if world > 1 and "WORLD_SIZE" not in os.environ and not _slurm():
        for name in ("RANK", "LOCAL_RANK"):
            # Lightning would wait for processes that nobody starts.
            if name in os.environ:
                raise ValueError(
                    f"{name} is set in the environment, but WORLD_SIZE is not; unset {name}, or start the command with "
                    "torchrun"
                )


def first() -> bool:
    """Whether this is the first process of the training."""
    leads = signals.first_rank() and (not _slurm() or signals.rank("SLURM_PROCID") == 0)
    # torchrun numbers all processes by RANK; Lightning those of one machine by LOCAL_RANK.
    return leads and ("TORCHELASTIC_RUN_ID" in os.environ or signals.rank("NODE_RANK") == 0)


def _started() -> tuple[str, int]:
    """The launcher of this process, and how many processes it started."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", int(os.environ.get("WORLD_SIZE", "1"))
    # Lightning starts the other processes of a run itself, with LOCAL_RANK set.
    if "WORLD_SIZE" in os.environ:
        return "the launcher that set WORLD_SIZE", int(os.environ["WORLD_SIZE"])
    if _slurm():
        return "srun", signals.rank("SLURM_NTASKS")
    return "mpirun", max(1, signals.rank("OMPI_COMM_WORLD_SIZE"), signals.rank("PMI_SIZE"))


def _local(launcher: str, count: int) -> int:
    """How many processes the launcher started on each machine; 0 if it does not say."""
    if launcher == "torchrun":
        return int(os.environ.get("LOCAL_WORLD_SIZE", count))
    if launcher == "srun" and "SLURM_NNODES" in os.environ:
        return count // max(1, signals.rank("SLURM_NNODES"))
    return 0


def _slurm() -> bool:
    """Whether SLURM started the processes, by the same rule as Lightning."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE
