"""How a training's processes were started: by this library, by torchrun or by SLURM, and which of them comes first."""

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
# Lightning leaves jobs of these names alone, whatever SLURM has set in them.
INTERACTIVE = ("bash", "interactive")


def check(devices: int) -> None:
    """Raise ValueError unless the environment fits a run on so many devices.

    Several processes that each believe to train alone would write into one folder.
    """
    for name in COUNTED:
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdigit()):
            raise ValueError(
                f"{name}={value!r} in the environment is not a whole number; unset {name}, or start "
                "the command by torchrun"
            )
    launcher, count = _started()
    if count != devices and (count > 1 or launcher in ("torchrun", "srun")):
        raise ValueError(
            f"{launcher} started {count} {'processes' if count > 1 else 'process'}, and run.devices is {devices}; set "
            f"run.devices={count}, or start one process without {launcher}"
        )
    if launcher == "torchrun" and int(os.environ.get("LOCAL_WORLD_SIZE", count)) != count:
        raise ValueError(
            f"torchrun started {count} processes on several machines; a run trains on one: pass --nnodes=1"
        )


def first() -> bool:
    """Whether this is the process that leads, of all that train together."""
    return signals.first_rank() and (not _slurm() or signals.rank("SLURM_PROCID") == 0)


def _started() -> tuple[str, int]:
    """Who started this process, and how many it started in all."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", int(os.environ.get("WORLD_SIZE", "1"))
    # Lightning starts the other processes of a run itself, each of which knows its place by LOCAL_RANK.
    if "WORLD_SIZE" in os.environ:
        return "the launcher that set WORLD_SIZE", int(os.environ["WORLD_SIZE"])
    return ("srun", signals.rank("SLURM_NTASKS")) if _slurm() else ("", 1)


def _slurm() -> bool:
    """Whether SLURM started the processes, as Lightning sees it."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE
