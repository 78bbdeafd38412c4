"""One of several processes that shard models with FSDP2: ``python THIS_FILE FOLDER RANK WORLD``.

FOLDER/jobs.json is a list of jobs: ``model`` (fields of the config, with ``kind``) and ``does`` (names of functions
below). The first process writes FOLDER/results.json: for each job the largest relative error of each, or the error.
"""

import copy
import datetime
import json
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import longspan
from longspan.models import checkpoint
from longspan.train.sharded import shard

LENGTH = 21


def built(fields):
    torch.manual_seed(0)
    config = checkpoint.config_of(fields)
    return checkpoint.MODEL_CLASSES[checkpoint.kind_of(config)][1](config).double().train()


def tokens(model, rows):
    return torch.randint(model.config.vocab, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def loss(model, rows):
    if isinstance(model, longspan.Seq2Seq):
        outputs = model(rows, model.shift(rows))
    elif isinstance(model, longspan.Encoder):
        return model(rows).square().mean()
    else:
        outputs, _ = model(model.shift(rows))
    return -model.likelihood.log_prob(outputs, rows).mean()


def error(found, wanted):
    """The largest error of any tensor, relative to the largest number of all."""
    largest = max(t.abs().max() for t in wanted.values())
    assert list(found) == list(wanted)
    return max(float((found[name] - wanted[name]).abs().max() / largest) for name in wanted)


def gradients(fields, mesh, folder):
    """Of the mean loss of all processes, compared with one process."""
    model = built(fields)
    rows = tokens(model, 2 * mesh.size())
    whole = copy.deepcopy(model)
    loss(whole, rows).backward()
    shard(model, mesh)
    # Twice: gradients are added up, as in an accumulation.
    for _ in range(2):
        (loss(model, rows[mesh.get_rank() :: mesh.size()]) / 2).backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return error(found, {name: p.grad for name, p in whole.named_parameters()})


def generation(fields, mesh, folder):
    """Step by step and with a state that holds no shards."""
    model = built(fields).eval()
    whole = copy.deepcopy(model)
    shard(model, mesh)
    rows = tokens(model, 2)[:, :5]
    if isinstance(whole, longspan.Seq2Seq):
        options = {"source": rows, "max_new_tokens": 6, "temperature": 0.0}
        return float((longspan.generate(model, **options) != longspan.generate(whole, **options)).sum())
    assert not any(isinstance(t, DTensor) for t in torch.utils._pytree.tree_leaves(model.init_state(2)))
    found, wanted = (longspan.generate(m, rows, max_new_tokens=6, temperature=0.0) for m in (model, whole))
    return float((found != wanted).sum())


def saved(fields, mesh, folder):
    """``longspan.save`` by all processes together, and ``longspan.load``."""
    model = built(fields)
    wanted = {name: t.clone() for name, t in model.state_dict().items()}
    shard(model, mesh)
    longspan.save(model, folder / "saved")
    return error(longspan.load(folder / "saved").state_dict(), wanted)


def tensor_parallel(fields, mesh, folder):
    """Maps that give each process some of the channels, which would be taken for narrower heads."""
    attention = built(fields).stack.attentions()[0]
    plan = dict.fromkeys(("query", "key", "value"), ColwiseParallel()) | {"out": RowwiseParallel()}
    parallelize_module(attention, mesh, plan)
    x = torch.randn(1, 5, attention.dim, dtype=torch.float64)
    message = r"tensor parallelism \(parallelize_module\) is not supported"
    with pytest.raises(ValueError, match=message):
        attention(x)
    # Whatever the compiler turns an error of its trace into.
    with pytest.raises(Exception, match=message):
        torch.compile(attention, backend="eager", fullgraph=True)(x)
    return 0.0


def materialized(fields, mesh, folder):
    """Built without memory, sharded, and drawn: finite, and the same as a whole model's in distribution."""
    whole = built(fields)
    with torch.device("meta"):
        config = checkpoint.config_of(fields)
        model = checkpoint.MODEL_CLASSES[checkpoint.kind_of(config)][1](config).double()
    shard(model, mesh)
    model.to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.constant_(weight, torch.nan)
    torch.manual_seed(0)
    model.reset_parameters()
    loss(model, tokens(model, 2)).backward()
    for name, weight in whole.named_parameters():
        found = dict(model.named_parameters())[name].full_tensor()
        assert found.isfinite().all(), name
        if found.numel() >= 16:
            assert 0.4 * weight.std() <= found.std() <= 2.5 * weight.std() + 1e-9, name
    return 0.0


def main():
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support on cpu")
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    mesh, results = init_device_mesh("cpu", (world,)), []
    for job in json.loads((folder / "jobs.json").read_text()):
        result = {}
        for name in job["does"]:
            try:
                result[name] = globals()[name](job["model"], mesh, folder)
            except Exception as problem:
                result[name] = f"{type(problem).__name__}: {problem}"
                if "-v" in sys.argv:
                    traceback.print_exc()
        results.append(result)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
