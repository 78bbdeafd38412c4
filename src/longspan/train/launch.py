"""Detect how the processes of a training were started: by Lightning, torchrun or SLURM."""

import os

from .._utils import signals

COUNTED = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "JSM_NAMESPACE_RANK",
)
# Lightning ignores SLURM in jobs with these names.
INTERACTIVE = ("bash", "interactive")


def check(devices: int) -> None:
    """Raise ValueError unless the environment fits a run on ``devices`` devices.

    Otherwise several independent processes could write into one folder.
    """
    for name in COUNTED:
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdigit()):
            raise ValueError(
                f"{name}={value!r} in the environment is not an integer; unset {name}, or start "
                "the command with torchrun"
            )
    launcher, count = _started()
    if count != devices and (count > 1 or launcher in ("torchrun", "srun")):
        raise ValueError(
            f"{launcher} started {count} {'processes' if count > 1 else 'process'}, but run.devices is {devices}; set "
            f"run.devices={count}, or start one process without {launcher}"
        )
    if launcher == "torchrun" and int(os.environ.get("LOCAL_WORLD_SIZE", count)) != count:
        raise ValueError(
            f"torchrun started {count} processes on several machines; a run uses one machine: pass --nnodes=1"
        )


def first() -> bool:
    """Whether this is the first process of the training."""
    return signals.first_rank() and (not _slurm() or signals.rank("SLURM_PROCID") == 0)


def _started() -> tuple[str, int]:
    """The launcher of this process, and how many processes it started."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", int(os.environ.get("WORLD_SIZE", "1"))
    # Lightning starts the other processes of a run itself, with LOCAL_RANK set.
    if "WORLD_SIZE" in os.environ:
        return "the launcher that set WORLD_SIZE", int(os.environ["WORLD_SIZE"])
    return ("srun", signals.rank("SLURM_NTASKS")) if _slurm() else ("", 1)


def _slurm() -> bool:
    """Whether SLURM started the processes, by the same rule as Lightning."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE
