"""What a fine-tuning trains of a model: all weights, low-rank changes of linear layers, or initial states."""

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor, nn

from .. import adapt
from .._utils import atomic_io
from .._utils.aliases import suggestion
from .._utils.optional_deps import need
from .._utils.spec import known
from .._utils.typecheck import check_fields
from ..models import checkpoint, pretrained, quantization
from ..models.decoder import Decoder
from ..modules.quantized import Quantized, QuantizedLinear
from .completions import IGNORED, Batch

METHODS = {"lora": 3e-4, "full": 2e-5, "state": 0.1}
"""The methods and their default learning rates"""
DECAYS = {"a_proj", "dt_proj", "gk_proj", "f_proj", "f_a_proj", "f_b_proj", "in_proj_a", "in_proj_ba", "fgate_preact"}
DECAYS |= {"forget_gate", "w_lora", "w_proj", "dt", "decay", "forget"}
"""Parts of the names of linear layers that compute decays"""
# Types of transformers whose fused kernels read the weight of this layer, so that peft refuses it.
_UNCHANGED = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


@dataclass(frozen=True)
class FinetuneConfig:
    """What is trained of which model."""

    source: str = ""
    """the model, as it was named"""
    method: str = "lora"
    """what is trained: lora, low-rank changes of linear layers | full, all weights | state, the initial states of
    recurrent layers"""
    targets: str = ""
    """with lora: the layers, as the ends of their names or patterns, separated by commas; by default all linear layers
    but the output layer and those of decays"""
    rank: int = 8
    """with lora: the rank of a change"""
    alpha: int = 16
    """with lora: a change is multiplied by alpha / rank"""
    weights: str = ""
    """with lora and state: int8 | int4, to which the frozen weights are rounded; by default they stay"""
    checkpointing: bool = False
    """store only each block's input for the backward"""

    def __post_init__(self):
        check_fields(self)
        known(self.method, METHODS, "method")
        if min(self.rank, self.alpha) < 1:
            raise ValueError(f"rank={self.rank} and alpha={self.alpha} must be at least 1")
        for name in () if self.method == "lora" else ("targets", "rank", "alpha"):
            if (value := getattr(self, name)) != getattr(FinetuneConfig, name):
                raise ValueError(f"{name}={value!r} requires method='lora', not {self.method!r}")
        if self.weights:
            known(self.weights, quantization.WEIGHTS, "kind of weights")
            if self.method == "full":
                raise ValueError(f"weights={self.weights!r} are frozen, but method='full' trains all; pass weights=''")
        if self.checkpointing and self.method == "state":
            raise ValueError("checkpointing=True has no effect with method='state', which carries a state; pass False")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


class Layers(NamedTuple):
    """Linear layers by name."""

    chosen: dict[str, Any]
    """those that a change is added to"""
    left: dict[str, Any]
    """the others"""


class Tuned(nn.Module):
    """A trained model and what a fine-tuning changes of it, which alone is in its ``state_dict``.

    Args:
        model: A ``Decoder``, a ``LongspanForCausalLM``, or a causal language model of transformers or
            flash-linear-attention. It is changed.
        config: What is trained.
        wide: Convert weights of half precision to float32. Without it frozen ones stay as they are.

    Raises:
        ImportError: peft is not installed, which ``method="lora"`` needs.
        ValueError: The model has nothing that the method can train, or no layer of a name in ``targets``.
    """

    model: Any
    decoder: Decoder | None
    peft: Any
    head: Any

    def __init__(self, model: Any, config: FinetuneConfig, wide: bool = True):
        super().__init__()
        self.config, self.packs = config, can_pack(model)
        inner = getattr(model, "decoder", model)
        decoder = inner if isinstance(inner, Decoder) else None
        # Not submodules, so that their weights are no parameters of this one.
        for name, value in (("model", model), ("decoder", decoder), ("peft", None), ("head", None)):
            object.__setattr__(self, name, value)
        self.dtypes = {name: p.dtype for name, p in model.named_parameters()}
        if config.method == "full" and quantization.described(model):
            raise ValueError("method='full' trains all weights, but those of few bits are frozen; pass method='lora'")
        if wide or config.method == "full":
            model.float()
        if config.weights:
            quantization.quantize(model, config.weights)
        whole = _count(model)
        if config.method == "full":
            self.trained: nn.Module = (decoder or model).requires_grad_(True)
            what = "all weights"
        elif config.method == "state":
            self.trained = adapt.initial_states(inner)
            inner.requires_grad_(False)
            count = sum(bool(list(layer.parameters())) for layer in self.trained.layers)
            what = f"the initial states of {count} of {len(self.trained.layers)} layers"
        else:
            what = self._add_changes()
            found = {name: p for name, p in model.named_parameters() if p.requires_grad}
            # Names of parameters cannot have dots.
            self.trained = nn.ParameterDict({name.replace(".", "/"): p for name, p in found.items()})
        self.opening = f"training {what}: {_count(self.trained):,} numbers; the model has {whole:,} weights"
        if config.checkpointing:
            self._store_inputs()
        if decoder is None:
            object.__setattr__(self, "head", _lazy_head(model))
        self.train()

    def train(self, mode: bool = True) -> "Tuned":
        """Put the model into training or evaluation mode too."""
        super().train(mode)
        self.model.train(mode)
        return self

    def nats(self, batch: Batch) -> Tensor:
        """Return the sum () of the losses of a batch, in nats."""
        inputs, targets, segments = batch[:3]
        if self.model.device != inputs.device:
            self.model.to(inputs.device)
        several = self.packs and bool((segments != segments[:, :1]).any())
        real = targets != IGNORED
        if self.decoder is not None or self.config.method == "state":
            reader: Any = self.trained if self.config.method == "state" else self.decoder
            given = {"segments": segments} if several else {}
            found = reader(inputs, targets=targets.masked_fill(~real, 0), **given)
            likelihood = found if isinstance(found, Tensor) else found[0]
            return -likelihood.masked_fill(~real, 0.0).sum()
        from ..compat.transformers.lazy_logits import cross_entropy
        from ..compat.transformers.packing import positions_of

        given = {"position_ids": positions_of(segments)} if several else {}
        logits = self.model(input_ids=inputs, use_cache=False, **given).logits
        return cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    def write(self, folder: Path, merge: bool = False) -> Path:
        """Write the result into a run directory -> its file or folder. With ``merge`` the changes join the weights."""
        method = self.config.method
        if self.head is not None:
            del self.head.forward
        if method == "state":
            assert isinstance(self.trained, adapt.InitialStates)
            self.trained.save(folder / "adapter.safetensors")
            return folder / "adapter.safetensors"
        if method == "lora":
            _write_folder(folder / "adapter", partial(self.peft.save_pretrained, save_embedding_layers=False))
            if not merge:
                return folder / "adapter"
            self.peft.merge_and_unload()
        place = folder / "model"
        for name, p in self.model.named_parameters():
            p.data = p.data.to(self.dtypes[name])
        if isinstance(self.model, Decoder):
            source = self.config.source
            path = pretrained.path(source) if pretrained.is_pretrained_name(source) else checkpoint.resolve(source)
            # Commands look there for the kind of data.
            run = checkpoint.read_config(path).get("run")
            checkpoint.save(self.model, place, extra={"run": run} if run else None)
        else:
            _write_folder(place, self._write_foreign)
        return place

    def _write_foreign(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        source = Path(self.config.source)
        # The tokenizer and its template.
        for path in sorted(source.iterdir()) if source.is_dir() else ():
            texts = path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json")
            if texts and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)

    def _add_changes(self) -> str:
        """Add low-rank changes to linear layers, as peft does -> what they are."""
        need("method='lora'", "peft", "transformers")
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import Linear as LoraLinear

        config, model = self.config, _for_peft(self.model)
        layers = _layers(model, config)
        names = list(layers.chosen)
        lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=names, task_type="CAUSAL_LM")
        lora._register_custom_module({QuantizedLinear: LoraLinear})
        model.name_or_path = config.source
        share = sum(map(_size, layers.chosen.values())) / _count(model)
        with warnings.catch_warnings():
            # peft reads an attribute that transformers will rename, and does not know our quantized layers.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            warnings.filterwarnings("ignore", "Unsupported layer type .*QuantizedLinear", UserWarning)
            object.__setattr__(self, "peft", get_peft_model(model, lora))
        return (
            f"LoRA of rank {config.rank} in {len(names)} of {len(names) + len(layers.left)} linear layers, which have "
            f"{share:.1%} of all weights ({_counted(layers.chosen)}; not in {_counted(layers.left) or 'any other'})"
        )

    def _store_inputs(self) -> None:
        if self.decoder is not None:
            self.decoder.stack.checkpointing = True
            return
        with warnings.catch_warnings():
            # Its name in the next version of transformers is another one.
            warnings.simplefilter("ignore", FutureWarning)
            self.model.gradient_checkpointing_enable({"use_reentrant": False})


def adapted(model: Any, path: str | os.PathLike[str]) -> adapt.FrozenStates | None:
    """Give a model in evaluation mode what a fine-tuning has written for it.

    Args:
        model: As for ``Tuned``.
        path: The file of a state adapter, or the folder of an adapter of peft, whose changes are added to the weights.

    Returns:
        The states from which sequences start; None for a folder.

    Raises:
        ImportError: peft is not installed, which folders need.
        ValueError: There is no adapter, or it is damaged or one of another model.
    """
    path, inner = Path(path), getattr(model, "decoder", model)
    if not path.is_dir():
        return adapt.load(path, inner).frozen(path.name.removesuffix(".safetensors"))
    if not (path / "adapter_config.json").is_file():
        raise ValueError(f"{path} is not the folder of an adapter: it has no adapter_config.json")
    need(f"the adapter in {path}", "peft", "transformers")
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is missing is an error below
            found = PeftModel.from_pretrained(_for_peft(model), path)
            given = load_peft_weights(str(path), device="cpu")
        if odd := sorted(given.keys() ^ get_peft_model_state_dict(found).keys()):
            raise ValueError(f"only one of them has {odd[0]}")
    except (ValueError, RuntimeError, KeyError, TypeError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} is damaged, or the adapter of another model: {reason}") from error
    found.merge_and_unload()
    return None


def _for_peft(model: Any) -> Any:
    """Return a model with the interface of transformers, which shares its weights."""
    if not isinstance(model, Decoder):
        return model
    from ..compat.transformers import LongspanForCausalLM

    return LongspanForCausalLM.from_longspan(model)


def start_of(model: Any) -> int | None:
    """Return the token before the first one of a sequence; None if sequences begin with their first token."""
    inner = getattr(model, "decoder", model)
    return inner.start if isinstance(inner, Decoder) else None


def can_pack(model: Any) -> bool:
    """Return whether a row of a model may have several sequences, each of which sees itself alone."""
    inner = getattr(model, "decoder", model)
    if isinstance(inner, Decoder):
        return all("segments" in one.supported_args for one in inner.stack.attentions())
    from ..compat.transformers.models import MODELS

    kind = model.config.model_type.removesuffix("_text")
    return kind not in MODELS or not MODELS[kind].leaks


def _size(layer: Any) -> int:
    """The number of weights of a linear layer."""
    return layer.in_features * layer.out_features + (0 if layer.bias is None else layer.bias.numel())


def _count(module: nn.Module) -> int:
    """The number of weights of a module, also of those in blocks."""
    packed = sum(m.inputs * m.outputs for m in module.modules() if isinstance(m, Quantized))
    return packed + sum(p.numel() for p in module.parameters())


def _layers(model: Any, config: FinetuneConfig) -> Layers:
    """The linear layers of a model that get a change. Raises ValueError."""
    head, kind = model.get_output_embeddings(), getattr(model.config, "model_type", "")
    linear = {name: m for name, m in model.named_modules() if type(m) in (nn.Linear, QuantizedLinear)}

    def wanted(name: str, layer: Any) -> bool:
        words = name.split(".")
        fused = words[-1] == "out_proj" and kind in _UNCHANGED
        small = min(layer.in_features, layer.out_features) <= config.rank
        return not (layer is head or fused or small or DECAYS.intersection(words))

    chosen = {name: layer for name, layer in linear.items() if wanted(name, layer)}
    if config.targets:
        chosen = {}
        for target in config.targets.split(","):
            target = target.strip()
            found = [n for n in linear if n == target or n.endswith(f".{target}") or fnmatchcase(n, target)]
            if not found or not target:
                ends = dict.fromkeys(name.rpartition(".")[2] for name in linear)
                guess = suggestion(target, ends)
                hint = f" (did you mean {guess!r}?)" if guess else ""
                raise ValueError(f"targets: no linear layer is named {target!r}{hint}; there are {', '.join(ends)}")
            chosen |= {name: linear[name] for name in found}
    if not chosen:
        raise ValueError("the model has no linear layer to train")
    return Layers(chosen, {name: layer for name, layer in linear.items() if name not in chosen})


def _end(name: str) -> str:
    """The end of a layer's name that says what it computes: ``attn.f_proj.0`` for ``model.layers.3.attn.f_proj.0``."""
    words = name.split(".")
    named = [i for i in range(len(words)) if not words[i].isdigit()][-2:]
    return ".".join(word for i, word in enumerate(words) if i in named or i > named[-1])


def _counted(layers: dict[str, Any]) -> str:
    ends = [_end(name) for name in layers]
    return ", ".join(f"{end} {ends.count(end)}" for end in dict.fromkeys(ends))


def _lazy_head(model: Any) -> Any:
    """Make a model's logits lazy, so that the loss computes a part of them at a time -> its output layer, or None."""
    from ..compat.transformers.lazy_logits import LazyLogits, output_layer

    head = output_layer(model)
    if type(head) not in (nn.Linear, QuantizedLinear):
        return None
    # Autocast has other numbers than the weights.
    head.forward = lambda hidden: LazyLogits(hidden.to(head.weight.dtype), head)
    return head


def _write_folder(folder: Path, write: Callable[[Path], Any]) -> None:
    """Write a folder under another name first. Raises ValueError if it cannot be written."""
    try:
        with atomic_io.new_folder(folder) as temporary:
            write(temporary)
            old = atomic_io.sibling_path(folder, "old")
            if folder.exists():
                os.rename(folder, old)
            os.rename(temporary, folder)
            atomic_io.remove(old)
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror or error}") from error


checkpoint.MODEL_CLASSES[checkpoint.CHANGES] = FinetuneConfig, Tuned
