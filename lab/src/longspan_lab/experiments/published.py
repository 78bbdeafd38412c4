"""Published figures, each with its source."""

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
    """Number of keys -> published loss; empty if nothing was published."""
    found = [row.losses for row in CAPACITY if (row.replaced, row.rule, row.kind) == (replaced, rule, kind)]
    return found[0] if found else {}


# Zhou et al. 2021 (2012.07436), tables 1 and 2, as repeated in Gu et al. 2021 (2111.00396), tables 13 and 14.
FORECAST_SOURCE = "Zhou et al. 2021 (2012.07436), tables 1 and 2, ETTh1"
# Squared and absolute error by predicted hours: of all seven series, and of the oil temperature from itself.
_HOURS = (24, 48, 168, 336, 720)
FORECAST: dict[str, dict[str, dict[int, tuple[float, float]]]] = {
    part: {name: dict(zip(_HOURS, errors, strict=True)) for name, errors in rows.items()}
    for part, rows in {
        "all": {
            "Informer": ((0.577, 0.549), (0.685, 0.625), (0.931, 0.752), (1.128, 0.873), (1.215, 0.896)),
            "Informer, full attention": (
                (0.620, 0.577),
                (0.692, 0.671),
                (0.947, 0.797),
                (1.094, 0.813),
                (1.241, 0.917),
            ),
            "LogTrans": ((0.686, 0.604), (0.766, 0.757), (1.002, 0.846), (1.362, 0.952), (1.397, 1.291)),
            "Reformer": ((0.991, 0.754), (1.313, 0.906), (1.824, 1.138), (2.117, 1.280), (2.415, 1.520)),
            "LSTMa": ((0.650, 0.624), (0.702, 0.675), (1.212, 0.867), (1.424, 0.994), (1.960, 1.322)),
            "LSTnet": ((1.293, 0.901), (1.456, 0.960), (1.997, 1.214), (2.655, 1.369), (2.143, 1.380)),
        },
        "OT": {
            "Informer": ((0.098, 0.247), (0.158, 0.319), (0.183, 0.346), (0.222, 0.387), (0.269, 0.435)),
            "Informer, full attention": (
                (0.092, 0.246),
                (0.161, 0.322),
                (0.187, 0.355),
                (0.215, 0.369),
                (0.257, 0.421),
            ),
            "LogTrans": ((0.103, 0.259), (0.167, 0.328), (0.207, 0.375), (0.230, 0.398), (0.273, 0.463)),
            "Reformer": ((0.222, 0.389), (0.284, 0.445), (1.522, 1.191), (1.860, 1.124), (2.112, 1.436)),
            "LSTMa": ((0.114, 0.272), (0.193, 0.358), (0.236, 0.392), (0.580, 0.698), (0.683, 0.768)),
            "DeepAR": ((0.107, 0.280), (0.162, 0.327), (0.239, 0.422), (0.445, 0.552), (0.658, 0.707)),
            "ARIMA": ((0.108, 0.284), (0.175, 0.424), (0.396, 0.504), (0.468, 0.593), (0.659, 0.766)),
            "Prophet": ((0.115, 0.275), (0.168, 0.330), (1.224, 0.763), (1.549, 1.820), (2.735, 3.253)),
        },
    }.items()
}


class Proteins(NamedTuple):
    """One row of the table on proteins."""

    task: str  # causal, which it calls UNI, or masked, BID
    name: str
    accuracy: float  # in per cent
    perplexity: float
    families: tuple[float, float]  # the same on families that are held out, which it calls OOD


# TrEMBL, proteins of at most 1024 residues.
PROTEIN_SOURCE = "Choromanski et al. 2020 (2009.14794), appendix C.3, table 2"
PROTEIN = (
    Proteins("causal", "empirical baseline", 9.92, 17.80, (9.07, 17.93)),
    Proteins("causal", "Transformer", 30.80, 9.37, (19.70, 13.20)),
    Proteins("causal", "Performer (generalized)", 31.58, 9.17, (18.44, 13.63)),
    Proteins("masked", "Transformer", 33.32, 9.22, (25.07, 12.09)),
    Proteins("masked", "Performer (generalized)", 36.09, 8.36, (24.10, 12.26)),
    Proteins("masked", "Performer (softmax)", 33.00, 9.24, (23.48, 12.41)),
)


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


# The Wall Street Journal corpus of 80 hours, which is not free, so ours use other data.
SPEECH_SOURCE = "Katharopoulos et al. 2020 (2006.16236), section 4.3, table 3"
SPEECH = (
    Speech("Bi-LSTM", 10.94, 1047),
    Speech("softmax", 5.12, 2711),
    Speech("lsh-4", 9.33, 2250),
    Speech("linear", 8.08, 824),
)
