"""Optional packages: the extra that installs each, and one message for all missing ones."""

from importlib.util import find_spec

# package -> the extra that installs it, or a key of LAB
EXTRAS = {
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "lightning": "train",
    "tensorboard": "train",
    "sklearn": "train",
    "matplotlib": "plot",
    "PIL": "data",
    "pooch": "data",
    "transformers": "transformers",
    "peft": "lora",
    "lm_eval": "eval",
    "tokenizers": "tokens",
    "pyarrow": "parquet",
    "datasets": "parquet",
    "wandb": "wandb",
    "kaldi_native_fbank": "speech",
    "soundfile": "speech",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "llguidance": "json",
    "longspan_lab": "lab",
    "gymnasium": "reinforcement",
    "popgym": "reinforcement",
    "minigrid": "reinforcement",
}
# longspan-lab and its extras -> what pip installs
LAB = {"lab": "./lab", "reinforcement": '"./lab[reinforcement]"'}


def install(*extras: str) -> str:
    """Return how to install extras, for messages. longspan is on no package index yet, so it needs a clone.

    >>> install("plot", "data"), install("lab")
    ('pip install ".[data,plot]" in a clone of longspan', 'pip install ./lab in a clone of longspan')
    """
    own, lab = sorted({*extras} - {*LAB}), [target for extra, target in LAB.items() if extra in extras]
    targets = [f'".[{",".join(own)}]"', *lab] if own else lab
    return f"pip install {' '.join(targets)} in a clone of longspan"


def need(what: str, *packages: str) -> None:
    """Raise ImportError, with the command, if any of these packages is missing; ``what`` names the feature."""
    if missing := [package for package in packages if find_spec(package) is None]:
        extras = {EXTRAS[package] for package in missing}
        raise ImportError(f"missing for {what}: {', '.join(missing)}; {install(*extras)}", name=missing[0])
