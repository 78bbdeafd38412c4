"""``longspan transcribe``: recordings to words, whole or while they are read."""

import itertools
import sys
from pathlib import Path

from .._utils import atomic_io, signals
from .parser import BEAMS, Parser, make, natural_int

HELP = "a checkpoint of a transcriber, or a model that comes with longspan: digits"
STANDARD_INPUT = "-"
MEMORY = "--beam, or use --stream for long recordings"
CHUNK = 0.1  # seconds that are read at a time


def parser() -> Parser:
    parser = make(
        "transcribe",
        "Print the words of recordings, by a model that was trained with CTC. Recordings are sound files of one "
        "channel (wav, flac, ogg) with at least as many samples per second as the model was trained on; more are "
        "converted. The name - reads a 16 bit wav stream from standard input. The model digits comes with longspan: it "
        "knows the English words from zero to nine. Of several files each one's words follow its name and a tab.",
        "longspan transcribe digits FILE.wav",
        "longspan transcribe digits FILE.wav --beam 8",
        "longspan transcribe digits FILE.wav --stream",
        "arecord -f S16_LE -r 16000 | longspan transcribe digits - --stream",
        "longspan transcribe reproduce/speech-work/linear FILE.wav",
    )
    parser.add_argument("folder", type=str, help=HELP)
    parser.add_argument("files", nargs="+", type=str, metavar="FILE.wav", help="the recordings; -: standard input")
    parser.add_argument(
        "--beam",
        type=natural_int(BEAMS),
        default=0,
        metavar="N",
        help="follow the N likeliest beginnings, each with all its alignments; 0: the likeliest label of each token",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="read a tenth of a second at a time and print words as soon as they are heard, in memory that does not "
        "grow with the recording; for causal models, with the same words as without",
    )
    return parser


def run(args) -> int:
    from . import trained

    model = trained.transcriber(args.folder)
    if args.stream and not model.config.causal:
        raise ValueError(f"--stream needs a causal model; {args.folder} sees whole recordings")
    told = _streamed if args.stream else _whole
    done = 0
    try:
        for path in args.files:
            if len(args.files) > 1:
                _write(f"{path}\t")
            try:
                told(model, path, args.beam)
            except ValueError as error:
                # What is wrong with a rate or a length is found by functions that know no file.
                raise error if _called(path) in str(error) else ValueError(f"{_called(path)}: {error}") from error
            done += 1
    except KeyboardInterrupt as error:
        _write("\n")
        raise signals.told(error, f"interrupted: {done} of {len(args.files)} recordings are transcribed") from error
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
    """The samples of a file or of standard input, a short block at a time, and the rate with each."""
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
