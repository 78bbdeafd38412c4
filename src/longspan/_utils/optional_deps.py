"""Optional packages: the extra that installs each, and one message for all missing ones."""

from importlib.util import find_spec

# package -> the extra that installs it
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
    "tokenizers": "tokens",
    "pyarrow": "parquet",
    "datasets": "parquet",
    "wandb": "wandb",
    "kaldi_native_fbank": "speech",
    "soundfile": "speech",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "gymnasium": "reinforcement",
    "popgym": "reinforcement",
    "minigrid": "reinforcement",
}


def install(*extras: str) -> str:
    """Return how to install extras, for messages. longspan is on no package index yet, so it needs a clone.

    >>> install("plot", "data")
    'pip install ".[data,plot]" in a clone of longspan'
    """
    return f'pip install ".[{",".join(sorted(extras))}]" in a clone of longspan'


def need(what: str, *packages: str) -> None:
    """Raise ImportError, with the command, if any of these packages is missing; ``what`` names the feature."""
    if missing := [package for package in packages if find_spec(package) is None]:
        extras = {EXTRAS[package] for package in missing}
        raise ImportError(f"missing for {what}: {', '.join(missing)}; {install(*extras)}", name=missing[0])
