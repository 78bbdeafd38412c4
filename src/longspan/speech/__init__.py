"""Speech: recordings to filter banks, transcribers that are trained by CTC, and the words that they hear."""

from .model import Transcriber, TranscriberState
from .transcribe import Listener, transcribe

__all__ = ["Listener", "Transcriber", "TranscriberState", "transcribe"]
