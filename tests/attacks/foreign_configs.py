"""Damaged checkpoints of other libraries: a model, or one line that names the checkpoint, in little time and memory.

Models of flash-linear-attention, of transformers, of longspan as transformers stores it, and ``.pth`` files of RWKV-7:
options of the config of other types and sizes, indexes and files cut or replaced, tensors of other shapes and names.
"""

import functools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

import longspan
from longspan.compat import fla
from longspan.compat import transformers as on_cpu
from longspan.compat.fla import models
from longspan.serving import hub

from . import Case
from ._bounds import bounded, complaint

SHORT, LONG = 60, 3_000
SECONDS, GIB = 20.0, 1.0
FAMILIES: dict[str, dict[str, Any]] = {
    "gla": {"num_heads": 2, "attn": {"layers": [1], "num_heads": 2, "window_size": 5}},
    "rwkv7": {"head_dim": 16, "decay_low_rank_dim": 4, "gate_low_rank_dim": 4, "a_low_rank_dim": 4},
    "mamba2": {"head_dim": 16, "state_size": 4},
    "gated_deltanet": {"num_heads": 2, "head_dim": 16},
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 1 << 20, 1 << 31, 10**9, 1 << 62, 1 << 63, 10**30, 0.0, 0.5, -0.5, 1e300),
    *("", "x", "64", "silu", "\0", "a" * 5000, [], [3], [1] * 100, ["x"], {}, {"a": 1}, {"layers": [0]}),
    *({"layers": 3, "num_heads": 2}, {"layers": [0], "num_heads": 0}, {"layers": [0], "num_heads": "2"}),
    *({"__float__": "Infinity"}, {"__float__": "x"}, [[[]]]),
)
TEXTS = ("", "null", "[]", "3", '"x"', "{", "[" * 100_000, '{"a":' * 50_000, "\0", "NaN", '{"weight_map": [1]}', "{}")
SHAPES = ((), (0,), (1,), (2, 2), (0, 0), (64,), (3, 1, 2), (1, 1, 32))


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    made = folder / "made"
    names = _made(made)
    for number in range(count):
        choice = random.Random(f"{seed}/{number}")
        name = choice.choice(names)
        ways = (_tensors,) if name.endswith(".pth") else (_option, _option, _option, _text, _index, _tensors)
        way = choice.choice((*ways, _cut))
        yield f"{number}-{way.__name__[1:]}-{name}", functools.partial(_attack, made / name, folder / name, way, choice)


def _made(folder: Path) -> list[str]:
    """Write the good checkpoints, and return their names."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 41}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, options in FAMILIES.items():
            family = models.supported()[name]
            wide = {} if name == "mamba2" else {"intermediate_size": 48}
            model = family.model(family.config(**small, **wide, **options))
            model.save_pretrained(folder / name)
            if name == "rwkv7":
                model.config.norm_eps = 1e-5
                fla.save_pth(model, folder / "rwkv.pth")
        decoder = longspan.Decoder(longspan.DecoderConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5))
        on_cpu.LongspanForCausalLM.from_longspan(decoder).save_pretrained(folder / "longspan")
        import transformers

        config = transformers.Lfm2Config(
            **small, num_attention_heads=2, num_key_value_heads=2, intermediate_size=48, layer_types=["conv", "conv"]
        )
        transformers.Lfm2ForCausalLM(config).save_pretrained(folder / "lfm2")
    return sorted(path.name for path in folder.iterdir())


def _attack(good: Path, place: Path, way: Callable[[Path, random.Random], None], choice: random.Random) -> str | None:
    if good.is_dir():
        shutil.copytree(good, place, dirs_exist_ok=True)
    else:
        shutil.copy(good, place)
    try:
        way(place, choice)
        # A tokenizer is not what is attacked.
        with bounded(SECONDS, GIB), mock.patch.object(hub, "_tokenizer", return_value=_TOKENIZER):
            if place.suffix == ".pth" or place.name in FAMILIES:
                fla.load(place)
            elif place.name == "longspan":
                on_cpu.LongspanForCausalLM.from_pretrained(place)
            elif hub.is_foreign(str(place)):
                hub.load(str(place))
    except OSError as error:
        return None if place.name in str(error) else complaint(error)
    except Exception as error:
        if said := complaint(error):
            return said
        return (
            None if place.name in str(error) or str(place) in str(error) else f"it does not name {place.name}: {error}"
        )
    finally:
        on_cpu.restore()
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    return None


_TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})


def _option(place: Path, choice: random.Random) -> None:
    path = place / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(choice.randint(1, 2)):
        config[choice.choice([*config, "x"])] = choice.choice(VALUES)
    path.write_text(json.dumps(config), encoding="utf-8")


def _text(place: Path, choice: random.Random) -> None:
    path = place / choice.choice(("config.json", "model.safetensors", "generation_config.json"))
    path.write_text(choice.choice(TEXTS), encoding="utf-8")


def _index(place: Path, choice: random.Random) -> None:
    names = list(load_file(place / "model.safetensors"))
    (place / "model.safetensors").rename(place / "part.safetensors")
    places: dict[str, Any] = dict.fromkeys(names, "part.safetensors")
    for _ in range(choice.randint(0, 2)):
        places[choice.choice([*names, "x"])] = choice.choice((None, 3, "", "x", "../x", "part.safetensors", []))
    content = {
        "metadata": choice.choice(({}, None, {"total_size": "x"})),
        "weight_map": choice.choice((places, [], None)),
    }
    text = choice.choice((json.dumps(content), json.dumps(content), choice.choice(TEXTS)))
    (place / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _tensors(place: Path, choice: random.Random) -> None:
    file = place if place.suffix == ".pth" else place / "model.safetensors"
    found: dict[str, Any] = torch.load(file) if place.suffix == ".pth" else load_file(file)
    name = choice.choice(sorted(found))
    match choice.randrange(5):
        case 0:
            del found[name]
        case 1:
            found[name] = torch.zeros(choice.choice(SHAPES))
        case 2:
            found[name] = found[name].to(choice.choice((torch.int8, torch.bool, torch.float64, torch.complex64)))
        case 3:
            found[choice.choice(("x", "blocks.999999999.ln1.weight", "blocks.-1.x", "model.layers.77.x"))] = torch.ones(
                1
            )
        case _:
            found[name.replace("0", choice.choice(("1", "20000", "9" * 40)))] = found.pop(name)
    if place.suffix == ".pth":
        torch.save(choice.choice((found, found, list(found.values()), {0: 1})), file)
    else:
        save_file(found, file, {"format": "pt"})


def _cut(place: Path, choice: random.Random) -> None:
    file = choice.choice(sorted(place.iterdir())) if place.is_dir() else place
    content = file.read_bytes()
    at = choice.randrange(len(content))
    file.write_bytes(choice.choice((content[:at], content[:at] + b"\xff" + content[at + 1 :], b"")))
