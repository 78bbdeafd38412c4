"""Published figures, typed in once, each with the place where it was read."""

from typing import NamedTuple


class Loss(NamedTuple):
    """The best test loss of one logged training."""

    replaced: bool  # keys and values drawn with replacement
    rule: str
    kind: str
    losses: dict[int, float]  # by number of keys


# Half the squared error, chance 0.5, keys of 64 channels, one seed each.
CAPACITY_SOURCE = "logs of github.com/ischlag/fast-weight-transformers, ebe13ea, folder synthetic/logs"


def _row(kind: str, *losses: float | None) -> Loss:
    found = zip((60, 100, 200, 300, 400, 600), losses, strict=True)
    return Loss(False, "sum", kind, {keys: loss for keys, loss in found if loss is not None})


def _replaced(kind: str, rule: str, *losses: float) -> Loss:
    return Loss(True, rule, kind, dict(zip((20, 60, 100, 200), losses, strict=True)))


CAPACITY = (
    _row("linear", 0.025, 0.164, 0.342, 0.397, 0.422, 0.451),
    _row("dpfp1", 0.000, 0.000, 0.173, 0.286, 0.341, 0.411),
    _row("dpfp2", 0.001, 0.001, 0.000, 0.068, 0.164, 0.323),
    _row("dpfp3", 0.000, 0.000, 0.001, 0.000, 0.036, 0.198),
    _row("favor64", 0.483, 0.496, 0.500, 0.500, None, 0.500),
    _row("favor128", 0.484, 0.500, 0.500, 0.500, None, 0.500),
    _row("favor512", 0.406, 0.500, 0.500, 0.500, None, 0.500),
    _row("softmax", 0.000, 0.000, 0.000, 0.000, 0.000, 0.030),
    _replaced("dpfp1", "sum", 0.097, 0.103, 0.111, 0.231),
    _replaced("linear", "delta", 0.001, 0.001, 0.150, 0.341),
    _replaced("dpfp1", "delta", 0.001, 0.005, 0.000, 0.171),
    # At 100 keys the log ends at step 300, where the training had not converged.
    _replaced("dpfp2", "delta", 0.001, 0.000, 0.085, 0.001),
)


def capacity(replaced: bool, rule: str, kind: str) -> dict[int, float]:
    """Number of keys -> published loss; empty where nothing was published."""
    found = [row.losses for row in CAPACITY if (row.replaced, row.rule, row.kind) == (replaced, rule, kind)]
    return found[0] if found else {}


class Text(NamedTuple):
    """A byte model's bits per byte on the test part of enwik8."""

    name: str
    bits: float
    millions: int  # of parameters
    source: str


# Models of bytes as they were published, best first among those of about 40 million parameters.
TEXT_SOURCE = (
    "byte models of published architectures; bits per byte of enwik8 from Dai et al. 2019 (1901.02860), Al-Rfou et al. "
    "2018 (1808.04444), Sukhbaatar et al. 2019 (1905.07799) and Krause et al. 2016 (1609.07959)"
)
TEXT = (
    Text("transformer with learned spans", 1.02, 38, "1905.07799"),
    Text("Transformer-XL, 12 layers", 1.06, 41, "1901.02860"),
    Text("transformer, 12 layers", 1.11, 44, "1808.04444"),
    Text("multiplicative LSTM", 1.24, 46, "1609.07959"),
)


class Speech(NamedTuple):
    """One row of the table on speech recognition."""

    name: str
    errors: float  # phoneme error rate on the validation set, in per cent
    epoch: int  # seconds of an epoch of training


# The Wall Street Journal corpus of 80 hours, which is not free, so that nothing is set beside these figures yet.
SPEECH_SOURCE = "Katharopoulos et al. 2020 (2006.16236), section 4.3, table 3"
SPEECH = (
    Speech("Bi-LSTM", 10.94, 1047),
    Speech("softmax", 5.12, 2711),
    Speech("lsh-4", 9.33, 2250),
    Speech("linear", 8.08, 824),
)
