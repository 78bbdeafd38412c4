"""Mistakes on the command line of ``longspan reproduce``: one line on stderr, exit code 2, and nothing written."""

import shlex
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the experiments draw: pip install longspan[plot]")
pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install longspan[train]")

from longspan.cli.entry import WRONG, main

MISTAKES = {
    # Any experiment.
    "approximatoin": "unknown experiment 'approximatoin' (did you mean 'approximation'?); known: ",
    "": "NAME",
    "capacity --kinds dfpf1": "unknown kind 'dfpf1' (did you mean 'dpfp1'?); known: dpfp1, dpfp2",
    "capacity --kind linear": "unknown option '--kind' (did you mean '--kinds'?); known: --help, --keys, --kinds",
    "capacity --replacing softmax": "replacing=softmax: the delta rule needs a fixed feature map, which",
    "capacity --keys 60,x": "--keys=60,x: expected numbers separated by commas",
    "capacity --keys 1": "keys=1 must be at least 2",
    "capacity --repeated ,": "--repeated=,: expected numbers",
    "capacity --steps 0": "steps=0 must be at least 1",
    "capacity --rate 0": "rate=0.0 must be positive",
    "approximation --features 15": "features=15 must be even: most maps make two of each row",
    "approximation --features 0": "features=0 must be at least 2",
    "approximation --estimators cosine": "unknown estimator 'cosine'; known: hyperbolic, positive, trigonometric",
    "approximation --angles 190": "angles=190 must be at most 180 degrees",
    "approximation --spreads 0": "spreads=0.0 must be positive",
    "approximation --draws 1": "draws=1 must be at least 2",
    "approximation --length 0": "length=0 must be at least 1",
    "capacity --scale paper": "this experiment has no scale 'paper'; it has: laptop",
    "copy --scale": "expected one argument",
    "copy --scale=huge": "this experiment has no scale 'huge'; it has: laptop, gpu, paper",
    "copy --quick --scale paper": "--quick cannot be combined with --scale paper",
    "approximation --size x": "--size: expected int, got x; see longspan reproduce approximation --help",
    "images --data text:stdlib": "unknown data set of images 'text'; known: cifar10, digits, mnist",
    "images --attentions lniear": "unknown name 'lniear' (did you mean 'linear'?)",
    "images --attentions linear;linear": "attentions=linear;linear: each of them must come once",
    "images --heads 3": "dim=128 is not a multiple of heads=3",
    "images --likelihood logistic": "unknown name 'logistic' (did you mean 'logistics'?)",
    "images --steps 0": "steps=0 must be at least 1",
    "images --learning_rate 0": "learning_rate=0.0 must be positive",
    "images --schedule linear": "unknown schedule 'linear'",
    "images --top 1": "top=1.0 must lie between 0 and 1: the part of each image that is given",
    "images --samples 0": "samples=0 must be at least 1",
    "images --tests -1": "tests=-1 must not be negative",
    "images --batches 1,0": "batches=1,0 must be at least 1",
    "images --lengths 0": "lengths=0 must be at least 1",
    "images --rounds 0": "rounds=0 must be at least 1",
    "language --models 'gla; lsmt'": "unknown model 'lsmt' (did you mean 'lstm'?)",
    "language --data mnist": "data=mnist: the models read bytes of a text, text:stdlib or text:PATH",
    "language --budget time": "unknown budget 'time'; known: seconds, steps",
    "language --seconds 0": "seconds=0.0 must be positive",
    "language --looks 0": "looks=0 must be at least 1",
    "language --heads 5": "dim=96 is not a multiple of heads=5",
    "lra --quick --specs sofmax": "unknown attention 'sofmax' (did you mean 'softmax'?)",
    "lra --quick --few linear(x=1)": "linear has no option 'x'; it has feature_map",
    "lra --quick --tasks listop": "unknown task 'listop' (did you mean 'listops'?)",
    "lra --quick --more image": "more=image: image is a task of all attentions already",
    "lra --quick --heads 3": "dim=8 is not a multiple of heads=3",
    "lra --quick --rate 0": "rate=0.0 must be positive",
    "lra --quick --rounds 0": "rounds=0 must be at least 1",
    "lra --quick --image-steps 0": "image_steps=0 must be at least 1",
    "lra --quick --device tpu": "unknown device 'tpu'",
    "lra --quick --seed=-1": "seed=-1 must not be negative",
    "memory --tasks repeat": "unknown task 'repeat'",
    "memory --agents GRU": "unknown agent 'GRU'",
    "memory --steps 100": "steps=100 is less than a block: 2 rollouts of 104 steps in each of 32 environments are 6656",
    "memory --rate 0": "rate=0.0 must be positive",
    "memory --discount 1.5": "discount=1.5 must be in [0, 1]",
    "memory --entropy=-1": "entropy=-1.0 must not be negative",
    "memory --parts 33": "parts=33 of environments=32: each needs one at least",
    "memory --environments 2 --rollout 1 --parts 2": "an update needs two steps at least",
    "memory --memory 0": "memory=0 must be at least 1",
    "memory --heads 0": "heads=0 must be at least 1",
    "memory --device tpu": "unknown device 'tpu'",
    "mqar --specs lniear": "unknown name 'lniear' (did you mean 'linear'?); known: ",
    "mqar --specs linear;": "empty spec in 'linear;'",
    "mqar --dims 8,0": "dims=8,0 must be at least 1",
    "mqar --heads 3": "dim=8 is not a multiple of heads=3",
    "mqar --rates 0": "rates=0.0 must be positive",
    "mqar --rates nan": "rates=nan must be a number from 0",
    "mqar --pairs x": "--pairs=x",
    "mqar --tokens 3": "tokens=3 must be at least 4",
    "mqar --vocab 31": "vocab=31 must be at least 32, twice the number of pairs",
    "mqar --steps 0": "steps=0 must be at least 1",
    "mqar --spec linear": "unknown option '--spec' (did you mean '--specs'?)",
    "transfer --heads 3": "dim=64 is not a multiple of heads=3",
    "transfer --features 0": "features=0 must be at least 1",
    "transfer --draws 0": "draws=0 must be at least 1",
    "transfer --images -1": "images=-1 must not be negative",
    "transfer --rate 0": "rate=0.0 must be positive",
    "transfer --finetune_rate -1": "rate=-1.0 must not be negative",
    "copy --specs lniear": "unknown name 'lniear' (did you mean 'linear'?); known: ",
    "copy --heads 3": "dim=128 is not a multiple of heads=3",
    "copy --length 127": "length=127 must be even: a separator and the symbols come twice",
    "copy --length 2": "length=2 must be at least 4",
    "copy --symbols 0": "symbols=0 must be at least 1",
    "copy --seeds -1": "seeds=-1 must not be negative",
    "copy --seeds x": "--seeds=x",
    "copy --rate 0": "rate=0.0 must be positive",
    "copy --steps 0": "steps=0 must be at least 1",
    "copy --drop_at 0": "drop_at=0 must be at least 1",
    "copy --positions absolute": "unknown positions 'absolute'; known: ",
    "forecast --data etth": "unknown series data 'etth' (did you mean 'ett'?)",
    "forecast --specs linaer": "unknown name 'linaer' (did you mean 'linear'?)",
    "forecast --horizons 25": "horizons=25: nothing is published for it, so --reads and --label must say it",
    "forecast --reads 24 --label 48": "label=48 hours are more than the 24 that are read for horizon 24",
    "forecast --steps 0": "steps=0 must be at least 1",
    "forecast --tests -1": "tests=-1 must not be negative",
    "forecast --rate 0": "rate=0.0 must be positive",
    "forecast --heads 3": "dim=64 is not a multiple of heads=3",
    "forecast --quick --seeds 0,1": "data=synthetic is made from the seed, so that several seeds would have several",
    "protein --quick --specs linaer": "unknown name 'linaer' (did you mean 'linear'?)",
    "protein --quick --draws 8": "draws=8: there are 7 parts of the residues to be masked",
    "protein --quick --steps 0": "steps=0 must be at least 1",
    "protein --quick --looked -1": "looked=-1 must not be negative",
    "protein --quick --rate 0": "rate=0.0 must be positive",
    "protein --quick --seeds 0,1": "data=synthetic is made from the seed, so that several seeds would have several",
    "scaling --specs lniear": "unknown name 'lniear' (did you mean 'linear'?); known: ",
    "scaling --specs sdpa": "sdpa is no layer; softmax is",
    "scaling --specs kernel": "kernel is no layer; linear is",
    "scaling --specs linear@c": "unknown suffix of a candidate 'c'; known: ",
    "scaling --heads 3 --specs softmax(kv_heads=2)": "kv_heads",
    "scaling --lengths 64,63": "lengths=64,63 must be at least 64",
    "scaling --tokens 0": "tokens=0 must be at least 1",
    "scaling --rounds 0": "rounds=0 must be at least 1",
    "scaling --limit 0": "limit=0.0 must be positive",
    "speech --data fsd": "unknown corpus of speech 'fsd' (did you mean 'fsdd'?); known: an4, fsdd, tones",
    "speech --data an4": "an4 cannot be downloaded; if you have its files, pass an4:FOLDER",
    "speech --units sounds": "unknown unit of labels 'sounds'; known: letters, phonemes, words",
    "speech --encoders linaer": "unknown name 'linaer' (did you mean 'linear'?)",
    "speech --encoders lstm;lstm": "encoders=lstm;lstm: each of them must come once",
    "speech --direction back": "unknown direction 'back'; known: bidirectional, causal",
    "speech --heads 5": "dim=96 is not a multiple of heads=5",
    "speech --context 1": "context=1 must be at least stride=2",
    "speech --learning_rate 0": "learning_rate=0.0 must be positive",
    "speech --beams 0": "beams=0 must be at least 1",
    "pattern --patterns lane(3)": "unknown name 'lane'; known: band, block",
    "pattern --patterns band(3);band(3,right=0)": "patterns=band(3);band(3,right=0): each of them must come once",
    "pattern --heads 3": "dim=64 is not a multiple of heads=3",
    "pattern --seeds -1": "seeds=-1 must not be negative",
    "pattern --data speech": "unknown data set of images 'speech'; known: ",
    "pattern --steps 0": "steps=0",
    "spans --data digits": "data=digits: spans are learned on text, text:stdlib or text:PATH",
    "spans --penalty 0": "penalty=0.0 must be positive; the spans without one are learned in any case",
    "spans --initial 200": "initial=200.0 is a span in tokens; it must lie between 0 and span=128",
    "spans --heads 3": "dim=64 is not a multiple of heads=3",
    "spans --tests -1": "tests=-1 must not be negative",
    "spans --evaluate_every 0": "evaluate_every=0 must be at least 1",
    "ponder --penalties 0": "penalties must be positive",
    "ponder --attention linaer": "unknown name 'linaer'",
    "ponder --cap 0": "cap=0 must be at least 1",
    "ponder --rate 0": "rate=0.0 must be positive",
    "lengths --positions relativ": "unknown positions 'relativ'",
    "lengths --positions alibi --attention gla": "gla has no alibi positions",
    "lengths --tests 0": "tests=0 must be at least 1",
    "lengths --dim 63": "dim=63 is not a multiple of heads=4",
    "lengths --rate 0": "rate=0.0 must be positive",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *shlex.split(line)]) == WRONG
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert MISTAKES[line] in err
    assert not Path("reproduce").exists()


MISSING = {
    "forecast --quick --series OIL": "unknown series 'OIL'; known: HUFL, HULL, LUFL",
    "forecast --quick --horizons 300": "validation of synthetic ends after 960 hours, too few to forecast 300 hours",
    "forecast --quick --data ett:nowhere.csv": "nowhere.csv",
    "lra --quick --listops listops:nowhere": "there is no such folder",
    "protein": "data=protein needs a file, protein:FILE.fasta or .fasta.gz: UniProt's own changes",
    "protein --data proteins": "unknown protein data 'proteins' (did you mean 'protein'?)",
    "protein --data synthetic:3": "data=synthetic:3: synthetic proteins are made from the seed",
    "protein --data protein:nowhere.fasta": "nowhere.fasta",
}


@pytest.mark.parametrize("line", MISSING)
def test_missing_data_are_one_line_before_the_first_measurement(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *line.split()]) == WRONG
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert MISSING[line] in err
    assert not list(Path("reproduce").glob("*.*"))
