"""Turn a transcriber of the speech experiment into a model that ships with the package.

    longspan reproduce speech --data fsdd:PATH --encoders gated_deltanet --direction causal ... --out FOLDER
    python -m longspan_lab.tools shipped_speech FOLDER gated_deltanet --data fsdd:PATH --name digits

writes ``src/longspan/models/digits``: the weights in bfloat16, and ``record.json``, with the command of the
training, its curve, and the share of correctly transcribed digits for the held-out speaker and the official test set.
``--data`` is the data of the experiment.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from longspan._utils import atomic_io, sealed_dir
from longspan.generation.transcription import Sound, transcribe
from longspan.models import checkpoint, pretrained
from longspan.models.transcriber import Transcriber

from ..experiments import EXPERIMENTS, page, provenance, speech, speech_train
from ..experiments.experiment import Result
from ..experiments.learning import parameters
from ..speech import corpora, fsdd
from ..speech.digits import SPOKEN
from ..speech.errors import rate

BEAMS, STREAMED = 8, 20
LICENCE = (
    "The weights were learned from recordings of the Free Spoken Digit Dataset, "
    "https://github.com/Jakobovski/free-spoken-digit-dataset, by Zohar Jackson and its contributors, CC BY-SA 4.0, "
    "which are not in the package."
)


def ship(out: Path, encoder: str, source: str, name: str) -> dict[str, Any]:
    """Write the encoder's model of an experiment's folder as the model ``name`` and return the record.

    Raises ValueError for a folder without such an experiment, and for other data than the experiment's.
    """
    path = out / "speech.json"
    result = sealed_dir.parsed(path, atomic_io.read(path))
    settings = result["settings"]
    rows = [row for row in result["rows"] if row.get("encoder") == encoder]
    if not rows:
        raise ValueError(f"{path} has no training of {encoder}")
    found, checksum = fsdd.recordings(source)
    if result["data"] != {"fsdd": checksum}:
        raise ValueError(f"{path} was made with other recordings than fsdd:{source}")
    commit = provenance.commit()  # before the files below change the folder
    folder = out / "speech-work" / speech.slug(encoder)
    run = checkpoint.read_config(folder)["run"]
    checkpoint.save(checkpoint.load(folder).bfloat16(), pretrained.FOLDER / name, extra={"run": run})
    model = pretrained.load(name)
    held = settings["speaker"] or sorted({one.speaker for one in found})[-1]
    strings = corpora.load(
        f"fsdd:{source}", units=settings["units"], speaker=held, longest=settings["longest"], seed=settings["seed"]
    )
    record = {
        "command": command(result),
        "seed": settings["seed"],
        "commit": commit,
        "versions": result["versions"],
        "machines": result["machines"],
        "data": result["data"],
        "licence": LICENCE,
        "parameters": parameters(model),
        "epochs": settings["epochs"],
        "cpu_seconds": result["cpu_seconds"],
        "curve": rows[0]["curve"],
        "held_out_speaker": held,
        "recordings": {
            "held-out speaker": heard(model, [one for one in found if one.speaker == held]),
            "official test, other speakers": heard(model, official(found, held)),
        },
        "strings": {
            part: {
                how: speech_train.errors(model, utterances, strings.labels, beams)
                for how, beams in (("greedy", 0), ("beam", BEAMS))
            }
            for part, utterances in strings.held.items()
        },
        "streaming": {"recordings": STREAMED, "largest_difference": streaming(model, official(found, held)[:STREAMED])},
    }
    checkpoint.write_text(pretrained.FOLDER / name / pretrained.RECORD, json.dumps(record, indent=2) + "\n")
    return record


def command(result: Result) -> str:
    """Return the command that trains the model, without folder names of this machine."""
    settings = result["settings"] | {"data": "fsdd:PATH"}
    return page.command(EXPERIMENTS["speech"], result | {"settings": settings})


def official(found: list[fsdd.Recording], held: str) -> list[fsdd.Recording]:
    """The official test set's recordings of the speakers of the training."""
    return [one for one in found if one.index in fsdd.OFFICIAL and one.speaker != held]


def heard(model: Transcriber, recordings: list[fsdd.Recording]) -> dict[str, Any]:
    """Transcribe single digits, one per file: number correct, and word error rate."""
    pairs = [(transcribe(model, one.samples, fsdd.RATE), [SPOKEN[one.digit]]) for one in recordings]
    return {"count": len(pairs), "right": sum(a == b for a, b in pairs), "word_errors": round(rate(pairs), 5)}


def streaming(model: Transcriber, recordings: list[fsdd.Recording]) -> float:
    """The largest difference between the scores of whole recordings and those frame by frame."""
    worst = 0.0
    for one in recordings:
        sound = Sound(model, fsdd.RATE)
        frames = torch.cat([sound.feed(one.samples), sound.finish()])[None]
        with torch.no_grad():
            whole, _ = model(frames)
            state, steps = model.init_state(1), []
            for frame in frames.split(1, 1):
                logits, state = model.step(frame, state)
                steps.append(logits)
        worst = max(worst, (torch.cat(steps, 1) - whole).abs().max().item())
    return worst


def main(*arguments: str) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the experiment")
    parser.add_argument("encoder", help="one of the experiment's encoders")
    parser.add_argument("--data", required=True, help="its training data: fsdd:PATH")
    parser.add_argument("--name", default="digits", help="name of the model")
    parsed = parser.parse_args(arguments)
    kind, _, source = parsed.data.partition(":")
    if kind != "fsdd":
        raise ValueError(f"--data={parsed.data}: only models of fsdd ship with the package")
    print(json.dumps(ship(parsed.out, parsed.encoder, source, parsed.name), indent=2))
