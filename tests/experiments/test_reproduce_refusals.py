"""Mistakes on the command line of ``longspan reproduce``: one line on stderr, exit code 2, and nothing written."""

import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest

from longspan.cli.entry import WRONG, main
from longspan_lab.experiments import EXPERIMENTS

MISTAKES = {
    # Any experiment.
    "approximatoin": "unknown experiment 'approximatoin' (did you mean 'approximation'?); known: ",
    "": "NAME",
    "all --only capacitty": "unknown experiment 'capacitty' (did you mean 'capacity'?); known: approximation, ",
    "all --skip third": "unknown experiment 'third'; known: approximation, ",
    "all --scale paper --only capacity": "this experiment has no scale 'paper'; it has: laptop",
    "all --data nowhere": "--data=nowhere",
    "all --quick --scale paper": "--quick cannot be combined with --scale paper",
    "all --rounds 3": "unknown option '--rounds'",
    "capacity --kinds dfpf1": "unknown kind 'dfpf1' (did you mean 'dpfp1'?); known: dpfp1, dpfp2",
    "capacity --kind linear": "unknown option '--kind' (did you mean '--kinds'?); known: --help, --keys, --kinds",
    "capacity --replacing softmax": "replacing=softmax: the delta rule needs a fixed feature map, which",
    "capacity --keys 60,x": "--keys=60,x: expected numbers separated by commas",
    "capacity --repeated ,": "--repeated=,: expected numbers",
    "capacity --steps 0": "steps=0 must be at least 1",
    "capacity --rate 0": "rate=0.0 must be positive",
    "approximation --features 15": "features=15 must be even: most maps make two of each row",
    "approximation --estimators cosine": "unknown estimator 'cosine'; known: hyperbolic, positive, trigonometric",
    "approximation --angles 190": "angles=190 must be at most 180 degrees",
    "approximation --spreads 0": "spreads=0.0 must be positive",
    "copy --scale": "expected one argument",
    "approximation --size x": "--size: expected int, got x; see longspan reproduce approximation --help",
    "images --data text:stdlib": "unknown data set of images 'text'; known: cifar10, digits, mnist",
    "images --attentions lniear": "unknown name 'lniear' (did you mean 'linear'?)",
    "images --attentions linear;linear": "attentions=linear;linear: each of them must come once",
    "images --heads 3": "dim=128 is not a multiple of heads=3",
    "images --likelihood logistic": "unknown name 'logistic' (did you mean 'logistics'?)",
    "images --schedule linear": "unknown schedule 'linear'",
    "images --top 1": "top=1.0 must lie between 0 and 1: the part of each image that is given",
    "images --tests -1": "tests=-1 must not be negative",
    "language --models 'gla; lsmt'": "unknown model 'lsmt' (did you mean 'lstm'?)",
    "language --data mnist": "data=mnist: the models read bytes of a text, text:stdlib or text:PATH",
    "language --budget time": "unknown budget 'time'; known: seconds, steps",
    "language --heads 5": "dim=96 is not a multiple of heads=5",
    "lra --quick --specs sofmax": "unknown attention 'sofmax' (did you mean 'softmax'?)",
    "lra --quick --few linear(x=1)": "linear has no option 'x'; it has feature_map",
    "lra --quick --tasks listop": "unknown task 'listop' (did you mean 'listops'?)",
    "lra --quick --more image": "more=image: image is a task of all attentions already",
    "lra --quick --heads 3": "dim=8 is not a multiple of heads=3",
    "memory --tasks repeat": "unknown task 'repeat'",
    "memory --agents GRU": "unknown agent 'GRU'",
    "memory --steps 100": "steps=100 is less than a block: 2 rollouts of 104 steps in each of 32 environments are 6656",
    "memory --discount 1.5": "discount=1.5 must be in [0, 1]",
    "memory --entropy=-1": "entropy=-1.0 must not be negative",
    "memory --parts 33": "parts=33 of environments=32: each needs one at least",
    "memory --environments 2 --rollout 1 --parts 2": "an update needs two steps at least",
    "mqar --specs lniear": "unknown name 'lniear' (did you mean 'linear'?); known: ",
    "mqar --specs linear;": "empty spec in 'linear;'",
    "mqar --dims 8,0": "dims=8,0 must be at least 1",
    "mqar --heads 3": "dim=8 is not a multiple of heads=3",
    "mqar --rates nan": "rates=nan must be a number from 0",
    "mqar --pairs x": "--pairs=x",
    "mqar --tokens 3": "tokens=3 must be at least 4",
    "mqar --vocab 31": "vocab=31 must be at least 32, twice the number of pairs",
    "mqar --spec linear": "unknown option '--spec' (did you mean '--specs'?)",
    "transfer --heads 3": "dim=64 is not a multiple of heads=3",
    "transfer --finetune_rate -1": "rate=-1.0 must not be negative",
    "copy --heads 3": "dim=128 is not a multiple of heads=3",
    "copy --length 127": "length=127 must be even: a separator and the symbols come twice",
    "copy --length 2": "length=2 must be at least 4",
    "copy --seeds -1": "seeds=-1 must not be negative",
    "copy --positions absolute": "unknown positions 'absolute'; known: ",
    "forecast --data etth": "unknown series data 'etth' (did you mean 'ett'?)",
    "forecast --specs linaer": "unknown name 'linaer' (did you mean 'linear'?)",
    "forecast --horizons 25": "horizons=25: nothing is published for it, so --reads and --label must say it",
    "forecast --reads 24 --label 48": "label=48 hours are more than the 24 that are read for horizon 24",
    "forecast --heads 3": "dim=64 is not a multiple of heads=3",
    "forecast --quick --seeds 0,1": "data=synthetic is made from the seed, so that several seeds would have several",
    "protein --quick --draws 8": "draws=8: there are 7 parts of the residues to be masked",
    "protein --quick --seeds 0,1": "data=synthetic is made from the seed, so that several seeds would have several",
    "scaling --specs lniear": "unknown name 'lniear' (did you mean 'linear'?); known: ",
    "scaling --specs sdpa": "sdpa is no layer; softmax is",
    "scaling --specs kernel": "kernel is no layer; linear is",
    "scaling --specs linear@c": "unknown suffix of a candidate 'c'; known: ",
    "scaling --heads 3 --specs softmax(kv_heads=2)": "kv_heads",
    "scaling --lengths 64,63": "lengths=64,63 must be at least 64",
    "speech --data fsd": "unknown corpus of speech 'fsd' (did you mean 'fsdd'?); known: an4, fsdd, tones",
    "speech --data an4": "an4 cannot be downloaded; if you have its files, pass an4:FOLDER",
    "speech --units sounds": "unknown unit of labels 'sounds'; known: letters, phonemes, words",
    "speech --encoders linaer": "unknown name 'linaer' (did you mean 'linear'?)",
    "speech --encoders lstm;lstm": "encoders=lstm;lstm: each of them must come once",
    "speech --direction back": "unknown direction 'back'; known: bidirectional, causal",
    "speech --heads 5": "dim=96 is not a multiple of heads=5",
    "speech --context 1": "context=1 must be at least stride=2",
    "pattern --patterns lane(3)": "unknown name 'lane'; known: band, block",
    "pattern --patterns band(3);band(3,right=0)": "patterns=band(3);band(3,right=0): each of them must come once",
    "pattern --heads 3": "dim=64 is not a multiple of heads=3",
    "pattern --data speech": "unknown data set of images 'speech'; known: ",
    "spans --data digits": "data=digits: spans are learned on text, text:stdlib or text:PATH",
    "spans --penalty 0": "penalty=0.0 must be positive; the spans without one are learned in any case",
    "spans --initial 200": "initial=200.0 is a span in tokens; it must lie between 0 and span=128",
    "spans --heads 3": "dim=64 is not a multiple of heads=3",
    "ponder --penalties 0": "penalties must be positive",
    "ponder --attention linaer": "unknown name 'linaer'",
    "lengths --positions relativ": "unknown positions 'relativ'",
    "lengths --positions alibi --attention gla": "gla has no alibi positions",
    "lengths --dim 63": "dim=63 is not a multiple of heads=4",
}


MISSING = {
    "forecast --quick --series OIL": "unknown series 'OIL'; known: HUFL, HULL, LUFL",
    "forecast --quick --horizons 300": "validation of synthetic ends after 960 hours, too few to forecast 300 hours",
    "forecast --quick --data ett:nowhere.csv": "nowhere.csv",
    "lra --quick --listops listops:nowhere": "there is no such folder",
    "protein": "data=protein needs a file, protein:FILE.fasta or .fasta.gz: UniProt's own changes",
}


@pytest.mark.parametrize("line", [*MISTAKES, *MISSING])
def test_mistakes_are_one_line_and_exit_code_2(line, capsys, tmp_path, monkeypatch):
    """And before the first measurement."""
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *shlex.split(line)]) == WRONG
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert (MISTAKES | MISSING)[line] in err
    # Data are looked for under the lock of the results.
    assert not list(Path("reproduce").glob("*.*")) if line in MISSING else not Path("reproduce").exists()


# 0 means all, none or a default, a seed or a number that may be 0; some are checked only once the data are there.
ZERO = "angles bias clip discount entropy evaluate_examples forecast.batch free images initial language.depth "
ZERO += "listops_length looked mqar.seconds pathfinder_length retrieval_length seed seeds segments.penalty tests "
ZERO += "text_length text_steps trace value warmup weight_decay window"


def test_every_other_number_refuses_0():
    wrong = set()
    for name, experiment in EXPERIMENTS.items():
        for one in fields(experiment.quick):
            value = getattr(experiment.quick, one.name)
            kind = type(value[0] if isinstance(value, tuple) else value)
            if kind is str or {one.name, f"{name}.{one.name}"} & set(ZERO.split()):
                continue
            try:
                replace(experiment.quick, **{one.name: (kind(0),) if isinstance(value, tuple) else kind(0)}).buildable()
                wrong.add(f"{name}.{one.name}")
            except ValueError:
                pass
    assert not wrong
