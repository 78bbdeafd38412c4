"""``longspan transcribe``: transcribe recordings of speech, offline or streaming."""

import itertools
import sys
from pathlib import Path

from .._utils import atomic_io, signals
from .parser import BEAMS, MODEL, Parser, make, model_help, natural_int

STANDARD_INPUT = "-"
MEMORY = "--beam, or use --stream for long recordings"
CHUNK = 0.1  # seconds read at a time


def parser() -> Parser:
    parser = make(
        "transcribe",
        "Transcribe recordings of speech with a model trained with CTC. A recording is a mono sound file (wav, flac or "
        "ogg). Its sample rate must be at least that of the model; a higher rate is resampled. The name - reads a "
        "16-bit wav stream from standard input.\n\nThe pretrained model digits recognizes the English words zero to "
        "nine. For several files, each line has the file name, a tab and the words.",
        "longspan transcribe digits FILE.wav",
        "longspan transcribe digits FILE.wav --beam 8",
        "longspan transcribe digits FILE.wav --stream",
        "arecord -f S16_LE -r 16000 | longspan transcribe digits - --stream",
        "longspan transcribe reproduce/speech-work/linear FILE.wav",
    )
    parser.add_argument("folder", type=str, metavar=MODEL, help=model_help("digits"))
    parser.add_argument("files", nargs="+", type=str, metavar="FILE.wav", help="a recording; - reads standard input")
    parser.add_argument(
        "--beam",
        type=natural_int(BEAMS),
        default=0,
        metavar="N",
        help="beam size of a CTC prefix beam search; 0: greedy, the most likely label at each step",
    )
    parser.add_flag(
        "--stream",
        "print words while the recording is read, 0.1 s at a time, in constant memory; requires a causal model, "
        "and prints the same words as without",
    )
    return parser


def run(args) -> int:
    from . import trained

    model = trained.transcriber(args.folder)
    if args.stream and not model.config.causal:
        raise ValueError(f"--stream requires a causal model; {args.folder} is bidirectional")
    write = _streamed if args.stream else _whole
    done = 0
    try:
        for path in args.files:
            if len(args.files) > 1:
                _write(f"{path}\t")
            try:
                write(model, path, args.beam)
            except ValueError as error:
                # Functions that check the rate and the length do not know the file.
                raise error if _called(path) in str(error) else ValueError(f"{_called(path)}: {error}") from error
            done += 1
    except KeyboardInterrupt as error:
        _write("\n")
        raise signals.with_text(error, f"interrupted after {done} of {len(args.files)} recordings") from error
    return 0


def _whole(model, path: str, beams: int) -> None:
    from ..generation.transcription import transcribe

    blocks = _blocks(path)
    first, rate = next(blocks)
    samples = itertools.chain([first], (samples for samples, _ in blocks))
    _write(" ".join(transcribe(model, samples, rate, beams)) + "\n")


def _streamed(model, path: str, beams: int) -> None:
    from ..generation.transcription import Listener

    listener, between = None, ""
    for samples, rate in _blocks(path):
        listener = listener or Listener(model, rate, beams)
        for word in listener.feed(samples):
            _write(between + word)
            between = " "
    for word in listener.finish() if listener else []:
        _write(between + word)
        between = " "
    _write("\n")


def _blocks(path: str):
    """Yield short blocks of samples of a file or of standard input, each with the sample rate."""
    from ..speech import wav

    if path != STANDARD_INPUT:
        yield from wav.chunks(path, CHUNK)
        return
    with atomic_io.reading(Path(_called(path))):
        yield from wav.stream(sys.stdin.buffer, _called(path), CHUNK)


def _called(path: str) -> str:
    return "standard input" if path == STANDARD_INPUT else path


def _write(text: str) -> None:
    print(text, end="", flush=True)
