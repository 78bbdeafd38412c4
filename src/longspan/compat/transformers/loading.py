"""Loading of checkpoints without invented, dropped or converted weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...models import checkpoint


class StrictLoading(PreTrainedModel):
    """A model of transformers whose ``from_pretrained`` requires every weight, and no other."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a model as transformers does, but raise an error where transformers would invent or convert weights.

        Args:
            args: arguments of ``PreTrainedModel.from_pretrained``.
            output_loading_info: return the model and a dict with details.
            kwargs: keyword arguments of ``PreTrainedModel.from_pretrained``.

        Raises:
            ValueError: weights are missing, unexpected, NaN, or of another shape or kind of numbers than the model's.
        """
        # transformers would raise an error that does not name the weights.
        kwargs.setdefault("ignore_mismatched_sizes", True)
        found: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = found
        odd = {
            what: sorted(str(one) for one in info.get(key) or ())
            for what, key in (
                ("missing", "missing_keys"),
                ("unexpected", "unexpected_keys"),
                ("of another shape", "mismatched_keys"),
            )
        }
        problems = [f"{len(names)} {what}: {', '.join(names[:3])}" for what, names in odd.items() if names]
        if problems:
            raise ValueError(f"the weights do not fit the model; {'; '.join(problems)}")
        checkpoint.refuse_nan("the model", {n: t for n, t in model.state_dict().items() if not t.is_meta})
        model._loaded()
        return (model, info) if output_loading_info else model

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any) -> Any:
        """Load weights after a check: transformers silently converts integers, bools and complex numbers to reals."""
        if not load_config.is_quantized:
            _check_kinds(model.state_dict(), state_dict, checkpoint_files or ())
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args)

    def _loaded(self) -> None:
        """Run after the weights are loaded."""

    def _get_name(self) -> str:
        """Return the name of a class that ``shift_smoothed_labels`` knows, also for a subclass of it."""
        # fully_shard (FSDP2) makes a subclass.
        known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        return next((cls.__name__ for cls in type(self).__mro__ if cls.__name__ in known), super()._get_name())


def shift_smoothed_labels(model_type: str, name: str) -> None:
    """Make Trainer shift the labels of the class ``name`` for ``label_smoothing_factor``.

    Trainer knows causal models by the names in a table. For other classes, it would train each token on itself.
    """
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(model_type, name)


def _check_kinds(wanted: Mapping[str, Tensor], given: Mapping[str, Any] | None, files: Sequence[str]) -> None:
    """Raise ValueError for weights whose kind of numbers differs from the model's, given or in files."""
    found = {name: t.dtype for name, t in (given or {}).items() if isinstance(t, Tensor)}
    for file in files:
        try:
            found |= {name: t.dtype for name, t in load_state_dict(file, map_location="meta").items()}
        # transformers raises ValueError for complex numbers.
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"cannot load {file}: {' '.join(str(error).split())}") from error
    odd = [
        f"{name} {dtype} instead of {wanted[name].dtype}"
        for name, dtype in found.items()
        if name in wanted and not checkpoint.same_kind(dtype, wanted[name].dtype)
    ]
    if odd:
        more = ", ..." if len(odd) > 3 else ""
        raise ValueError(f"the weights do not fit the model; {len(odd)} of another kind: {', '.join(odd[:3])}{more}")
