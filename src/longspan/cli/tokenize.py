"""``longspan tokenize``: texts to a folder of tokens for training."""

from pathlib import Path

from .parser import Parser, make, natural_int, positive_int

MEMORY = "--shard-tokens"


def parser() -> Parser:
    parser = make(
        "tokenize",
        "Encode texts with a tokenizer and write a folder of memory-mapped tokens, which longspan train reads as "
        "tokens:DIR. Inputs are text files (.txt, .md), lines of JSON (.jsonl), Parquet files, folders of these, and "
        "folders that Hugging Face datasets wrote with save_to_disk; .gz and .xz are unpacked.\n\n"
        "The tokenizer is a tokenizer.json of Hugging Face tokenizers, or is trained on the inputs. Finished shards "
        "are kept: the same command continues after it was stopped.",
        "longspan tokenize books --train-bpe 16000 --out tokens/books",
        "longspan tokenize part-*.jsonl.gz --tokenizer tokenizer.json --end '<|endoftext|>' --out tokens/web",
        "longspan tokenize stories.txt --separator '<|endoftext|>' --train-bpe 4096 --out tokens/stories",
        "longspan tokenize --verify tokens/books",
    )
    parser.add_argument("files", type=str, nargs="*", metavar="FILE", help="files and folders, in this order")
    parser.add_text("--out", "DIR", "the folder to write")
    parser.add_text("--tokenizer", "FILE", "a tokenizer.json, or a folder that has one")
    parser.add_argument(
        "--train_bpe",
        type=natural_int(2**24),
        default=0,
        metavar="VOCAB",
        help="train a byte-level BPE with this number of tokens on the inputs instead; its token <|endoftext|> ends "
        "each document",
    )
    parser.add_argument(
        "--train_letters",
        type=positive_int(10**9),
        default=10**9,
        help="with --train-bpe: train on the first N characters of the inputs",
    )
    parser.add_text("--end", "TOKEN", "token of the tokenizer to append to each document; by default none")
    parser.add_text("--field", "NAME", "field or column that has the text of a document", default="text")
    parser.add_text(
        "--separator", "TEXT", "text between the documents of a text file; by default each text file is one document"
    )
    parser.add_flag(
        "--special",
        "special tokens of the tokenizer that documents name, such as <|im_start|>, become these tokens; by "
        "default their names are text",
    )
    parser.add_argument(
        "--shard_tokens", type=positive_int(2**31), default=2**26, help="tokens per shard; a shard is kept in memory"
    )
    parser.add_text("--verify", "DIR", "read a folder of tokens and compare it with its index")
    return parser


def run(args) -> int:
    from .._utils.cache_dirs import expanded
    from ..data import documents, token_shards, tokenization

    if args.verify:
        if args.files or args.out or args.tokenizer or args.train_bpe:
            raise ValueError("--verify reads a folder of tokens; it cannot be combined with inputs or other options")
        from .._utils.progress import track

        index = token_shards.verify(expanded(args.verify), track)
        print(f"{args.verify}: {_figures(index)}; all files have the sha256 that the index records")
        return 0
    if not args.files:
        raise ValueError("no inputs; name files or folders of texts, e.g. longspan tokenize book.txt --out tokens/book")
    if not args.out:
        raise ValueError("--out is missing; name the folder to write, e.g. --out tokens/book")
    if bool(args.tokenizer) == bool(args.train_bpe):
        raise ValueError("pass either --tokenizer FILE or --train-bpe VOCAB")
    if args.train_bpe and args.end:
        raise ValueError(f"--end requires --tokenizer; with --train-bpe documents end with {tokenization.END}")
    folder, inputs = expanded(args.out), documents.sources(list(args.files))
    text = tokenization.load_tokenizer(expanded(args.tokenizer)) if args.tokenizer else ""
    with token_shards.new_or_continued(folder):
        if not text:
            text = _trained(folder, inputs, args)
        lines = _Lines(inputs)
        index = tokenization.write(
            folder,
            inputs,
            text,
            end=args.end or (tokenization.END if args.train_bpe else ""),
            field=args.field,
            separator=args.separator,
            special=args.special,
            shard=args.shard_tokens,
            options={"train_bpe": args.train_bpe, "train_letters": args.train_letters} if args.train_bpe else {},
            report=lines.at,
        )
    print(f"{folder}: {_figures(index)}; train with --run.data tokens:{args.out}")
    return 0


class _Lines:
    """Progress by the size of the inputs that are begun."""

    def __init__(self, inputs: list):
        from .._utils import progress

        self.before, total = {}, 0
        for one in inputs:
            self.before[one.path] = total
            total += one.size
        self.lines = progress.Lines(max(1, total))

    def at(self, source, index) -> None:
        self.lines.at(
            self.before[source.path], "bytes before", f"{source.path.name}; {index['tokens']:,} tokens in shards"
        )


def _trained(folder: Path, inputs: list, args) -> str:
    """The tokenizer of a folder that is incomplete, or else a new one."""
    from .._utils import atomic_io, progress
    from ..data import token_shards, tokenization

    path, mark = folder / token_shards.TOKENIZER, folder / token_shards.INDEX
    if mark.exists() and path.exists():
        return atomic_io.read_text(path)
    progress.say(f"training a BPE of {args.train_bpe:,} tokens")
    return tokenization.train_bpe(
        inputs, args.train_bpe, field=args.field, separator=args.separator, letters=args.train_letters
    )


def _figures(index: dict) -> str:
    size = sum(one["bytes"] for one in index["files"])
    return (
        f"{index['tokens']:,} tokens of {index['documents']:,} documents in {len(index['shards'])} shards, "
        f"{size / 1e6:,.1f} MB, vocabulary {index['vocab']:,}"
    )
