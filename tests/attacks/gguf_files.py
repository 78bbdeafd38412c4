"""Damaged GGUF files: a model, or one line that names the file, in little time and memory.

Files of several architectures are cut, have bytes and numbers of their header replaced, and are written anew with other
metadata, names, shapes and types of tensors.
"""

import functools
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from longspan.compat import gguf
from longspan.compat import transformers as on_cpu
from longspan.compat.gguf import container
from longspan.data.tokenization import byte_letters
from longspan.ops.quantized.formats import FORMATS, Blocks

from . import Case
from ._bounds import bounded, complaint

SHORT, LONG = 60, 1_000
SECONDS, GIB = 20.0, 0.25
NUMBERS = (*range(4), 7, 8, 9, 13, 31, 33, 255, *(1 << n for n in (16, 31, 40, 62, 63)), (1 << 32) - 1, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, 64, 1 << 16, 1 << 31, 1 << 40, 1 << 63, -1, -(1 << 40), True, False, 0.0, 0.5, -1.0, 1e30),
    *(float("nan"), float("inf"), "", "x", "mamba2", "lfm2", "a" * 5000, [], [0], [1] * 9, [1 << 40], ["x"], [0.5]),
    *([True],),
)
SHAPES = ((1,), (32,), (1, 1), (2, 32), (32, 2), (32, 32), (64, 32), (1, 1, 1, 32), (3, 5, 32), (1 << 12, 32))
SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2Config", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2}),
    "lfm2": (
        "Lfm2Config",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "qwen35": (
        "Qwen3_5TextConfig",
        {
            **{"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
            **{"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
        },
    ),
}


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    made = folder / "made"
    _make(made)
    for number in range(count):
        choice = random.Random(f"{seed}/{number}")
        name, way = (
            choice.choice(sorted(MODELS)),
            choice.choice((_cut, _byte, _byte, _number, _number, _entry, _entry, _tensor)),
        )
        place = folder / f"{number}.gguf"
        yield (
            f"{number}-{way.__name__[1:]}-{name}",
            functools.partial(_attack, made / f"{name}.gguf", place, way, choice),
        )


def _make(folder: Path) -> None:
    """Write the good files."""
    folder.mkdir()
    words = Tokenizer(models.BPE(vocab={**byte_letters(), "ab": 256}, merges=[("a", "b")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.add_special_tokens(["<|end|>", "<|pad|>"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, (config, options) in MODELS.items():
            made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL, **options))
            gguf.save(made, folder / f"{name}.gguf", weights="q8_0", tokenizer=words.to_str())


def _attack(
    good: Path, place: Path, way: Callable[[bytes, Path, random.Random], bytes], choice: random.Random
) -> str | None:
    try:
        place.write_bytes(way(good.read_bytes(), good, choice))
        with bounded(SECONDS, GIB):
            gguf.load(place)
            gguf.read_tokenizer(place)
    except Exception as error:
        return complaint(error) or (None if place.name in str(error) else f"it does not name {place.name}: {error}")
    finally:
        on_cpu.restore()
        place.unlink(missing_ok=True)
    return None


def _header(good: Path) -> int:
    """Bytes before the first tensor."""
    return min(one.start for one in container.Container(good).tensors.values())


def _cut(content: bytes, good: Path, choice: random.Random) -> bytes:
    return content[: choice.randrange(choice.choice((len(content), _header(good))))]


def _byte(content: bytes, good: Path, choice: random.Random) -> bytes:
    at = choice.randrange(_header(good))
    return (
        content[:at] + bytes([choice.choice((0, 1, 255, content[at] ^ 1 << choice.randrange(8)))]) + content[at + 1 :]
    )


def _number(content: bytes, good: Path, choice: random.Random) -> bytes:
    """A whole number of the header, such as a count, a size or an offset, is another."""
    size = _header(good)
    small = [at for at in range(8, size - 8) if 0 < int.from_bytes(content[at : at + 8], "little") < 1 << 20]
    at, code = choice.choice(small), choice.choice(("<Q", "<Q", "<I"))
    number = struct.pack(code, choice.choice(NUMBERS) % (1 << 8 * struct.calcsize(code)))
    return content[:at] + number + content[at + len(number) :]


def _read(good: Path) -> tuple[dict[str, Any], dict[str, container.Content]]:
    found = container.Container(good)
    data = {
        key: value if isinstance(value, list | str | int | float) else value.tolist()
        for key, value in found.metadata.items()
    }
    return data, {name: container.Content(place.shape, found.read(name)) for name, place in found.tensors.items()}


def _entry(content: bytes, good: Path, choice: random.Random) -> bytes:
    data, tensors = _read(good)
    for _ in range(choice.randint(1, 2)):
        key = choice.choice(sorted(data))
        if choice.random() < 0.2:
            data.pop(key)
        else:
            data[key] = choice.choice(VALUES)
    return b"".join(container.pieces(data, tensors))


def _tensor(content: bytes, good: Path, choice: random.Random) -> bytes:
    data, tensors = _read(good)
    name = choice.choice(sorted(tensors))
    match choice.randrange(4):
        case 0:
            del tensors[name]
        case 1:
            shape = choice.choice(SHAPES)
            tensors[name] = container.Content(shape, torch.full(shape, choice.choice((0.0, 1.0, float("nan")))))
        case 2:
            form = choice.choice(sorted(FORMATS))
            one, shape = FORMATS[form], tensors[name].shape
            width = -(-shape[-1] // one.block) * one.block
            raw = torch.randint(0, 256, (shape[0], one.row_bytes(width)), dtype=torch.uint8)
            tensors[name] = container.Content((shape[0], width), Blocks(raw, form, width))
        case _:
            new = choice.choice((name.replace("0", choice.choice(("1", "20000", "9" * 40))), "", "x", "blk.-1.x", "\0"))
            tensors[new] = tensors.pop(name)
    return b"".join(container.pieces(data, tensors))
