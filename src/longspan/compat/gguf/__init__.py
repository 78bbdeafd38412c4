"""GGUF files, the format of llama.cpp: hybrid and recurrent models read into transformers, and written from them.

from longspan.compat import gguf

model = gguf.load("model.gguf")     # or longspan.load("model.gguf")
gguf.save(model, "tuned.gguf", weights="q8_0")
"""

from .models import load, save

__all__ = ["load", "save"]
