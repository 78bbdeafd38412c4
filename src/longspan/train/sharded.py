"""Training with weights, gradients and optimizer states in parts, one for each process (FSDP2)."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ..models import parts
from ..models.checkpoint import first_names
from ..models.seq2seq import Seq2Seq
from ..models.stacks import Reversible, Stack
from ..models.stacks.block import Block
from ..modules.init import fill
from . import together
from .config import TrainConfig
from .place import placed

# Entries of Lightning's checkpoint that are stored in parts.
IN_PARTS = ("state_dict", "optimizer_states")


def check(model: nn.Module) -> None:
    """Raise ValueError for a model that cannot be sharded."""
    if scalars := [name for name, parameter in model.named_parameters() if not parameter.ndim]:
        raise ValueError(
            f"strategy='fsdp' cannot share the single number {scalars[0]} among processes, as of stack='act'; choose "
            "strategy='ddp' or another stack"
        )
    for stack in model.modules():
        if isinstance(stack, Stack) and isinstance(stack.run, Reversible):
            raise ValueError(
                "strategy='fsdp' does not support stack='reversible', whose backward pass calls parts of blocks; "
                "choose strategy='ddp' or stack='plain' with checkpointing=True"
            )


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model over the processes of a mesh with ``fully_shard``: each block of its stacks, then the rest.

    Args:
        model: A decoder, an encoder or an encoder-decoder. Its class becomes a subclass with the prefix ``FSDP``.
        mesh: The processes, with one dimension.

    Raises:
        ValueError: For a reversible stack, whose backward pass calls parts of blocks, and for the stack ``act``, which
            has a parameter without dimensions.
    """
    check(model)
    for module in list(model.modules()):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
            register_fsdp_forward_method(module, "cross_state")
    fully_shard(model, mesh=mesh)
    if isinstance(model, Seq2Seq):
        # It encodes the source and projects it for the cross attentions.
        register_fsdp_forward_method(model, "init_state")


def shard_task(task: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard the model and the heads of a training task; other processes take the weights of the first one.

    The other processes have built the model without memory (on the meta device).
    """
    model = task.model
    whole = {name: value.detach() for name, value in model.state_dict().items()} if mesh.get_rank() == 0 else {}
    shard(model, mesh)
    for head in task.objective.children():
        if any(True for _ in head.parameters()):
            fully_shard(head, mesh=mesh)
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device=device)
    # One after the other, so that no process but the first one has more than one whole weight.
    with torch.no_grad():
        for name, own in unique(model).items():
            value = whole[name].to(device) if whole else torch.empty(own.shape, dtype=own.dtype, device=device)
            if not isinstance(own, DTensor):
                dist.broadcast(value, 0)
            fill(own, value)


def unique(module: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name; tied ones once."""
    state = module.state_dict(keep_vars=True)
    return {name: state[name] for name, first in first_names(module).items() if name == first}


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 with our checkpoints, which any number of processes can read."""

    def __init__(
        self, model: nn.Module, run: TrainConfig, extra: Mapping[str, Any], backend: str, same: Mapping[str, Any]
    ):
        super().__init__(
            data_parallel_size=run.world,
            tensor_parallel_size=1,
            process_group_backend=backend,
            timeout=timedelta(seconds=run.timeout),
        )
        self.wanted, self.run, self.extra, self.same = model, run, dict(extra), same
        self.after_save: Callable[[], None] = lambda: None
        """what the first process does once the next checkpoint is complete, if it is written in the background"""
        self._saving: parts.Saving | None = None
        self._group: Any = None

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        # Before the mesh is made, which all processes do together.
        together.require_same(self.same)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights and buffers, each process with its part."""
        return self.lightning_module.state_dict()  # pyright: ignore[reportOptionalMemberAccess] (set before any checkpoint)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: ``save_checkpoint`` reads the optimizer."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint in parts, or begin to, after the one before is complete."""
        self.finish()
        training = {name: value for name, value in checkpoint.items() if name not in IN_PARTS}
        state = checkpoint["state_dict"]
        training["plain"] = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        states, plain = self._optimizer()
        training["optimizer"] = plain
        extra = self.extra | {"step": checkpoint["global_step"]}
        tensors, place = self._tensors() | states, Path(filepath)
        if not self.run.async_checkpoints:
            parts.save(self.wanted, tensors, place, training=training, extra=extra)
            return
        # A separate group on the CPU, so that the writing does not wait for the training's collectives.
        self._group = self._group or dist.new_group(backend="gloo")
        self._saving = parts.save_async(
            self.wanted,
            tensors,
            place,
            training=training,
            extra=extra,
            group=self._group,
            done=self.after_save,
        )

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; all processes call this together.

        Raises:
            ValueError: In all processes, if it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving:
            saving.wait()

    def settle(self) -> str:
        """Wait for this process's part of the checkpoint that is being written, and return its error; "" for none."""
        saving, self._saving = self._saving, None
        return saving.problem() if saving else ""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill the weights and the optimizer from a checkpoint in parts."""
        task = self.lightning_module
        assert task is not None
        self._begin_optimizer(parts.shapes(checkpoint_path))
        states, _ = self._optimizer()
        training = placed(checkpoint_path, parts.restore(checkpoint_path, self._tensors() | states), self.run)
        self._set_plain(training.pop("optimizer"))
        task.load_state_dict(training.pop("plain"), strict=False)
        return training | {"state_dict": {}, "optimizer_states": []}

    def _tensors(self) -> dict[str, Tensor]:
        task = self.lightning_module
        assert task is not None
        return {name: t.detach() for name, t in unique(task).items() if isinstance(t, Tensor)}

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self.lightning_module.named_parameters())  # pyright: ignore[reportOptionalMemberAccess] (set before any checkpoint)

    def _optimizer(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """The optimizer's state by parameter: its tensors, and its other values."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in self._named().items():
            for key, value in self.optimizers[0].state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value
                else:
                    plain.setdefault(name, {})[key] = value
        return tensors, plain

    def _begin_optimizer(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Give the optimizer a state of the stored shapes, sharded as the parameters where it has their shape."""
        for name, parameter in self._named().items():
            prefix = f"optimizer.{name}."
            for stored, (size, dtype) in shapes.items():
                # Names of parameters contain dots, names of states do not.
                if stored.startswith(prefix) and "." not in (key := stored.removeprefix(prefix)):
                    same = size == parameter.shape and key != "step"
                    value = torch.zeros_like(parameter, dtype=dtype) if same else torch.zeros(size, dtype=dtype)
                    self.optimizers[0].state[parameter][key] = value.detach()

    def _set_plain(self, plain: Mapping[str, Mapping[str, Any]]) -> None:
        for name, values in plain.items():
            self.optimizers[0].state[self._named()[name]].update(values)
