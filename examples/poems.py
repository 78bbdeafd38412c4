"""Classical Chinese poems: make texts and a tokenizer of characters, and measure a model that was trained on them.

npm pack chinese-poetry && tar xzf chinese-poetry-*.tgz
python examples/poems.py prepare package --out poems
longspan tokenize poems/poems.jsonl --tokenizer poems/tokenizer.json --end '<|endoftext|>' --out poems/tokens
longspan train --config poems
python examples/poems.py compare
python examples/poems.py measure runs/poems
python examples/poems.py load

A text is a form, a title and lines: "五絕《登鸛雀樓》\n白日依山盡，黃河入海流。\n欲窮千里目，更上一層樓。"
"""

# ruff: noqa: RUF001 (punctuation of Chinese)

import argparse
import collections
import itertools
import json
import math
import random
import re
import sys
import time
from pathlib import Path

END, UNTITLED = "<|endoftext|>", "無題"
# Lines and characters per line of the regulated forms; other poems are 詩.
FORMS = {(4, 5): "五絕", (4, 7): "七絕", (8, 5): "五律", (8, 7): "七律"}
ORDER = 6  # of PPMd
STOPS = "，。？！；、："
KEPT = re.compile(
    rf"..?《[\u3400-\u9fff\U00020000-\U0003ffff]{{1,16}}》\n[\u3400-\u9fff\U00020000-\U0003ffff{STOPS}\n]+"
)


def lines(text):
    """The lines of a poem, without their punctuation."""
    return [line for line in re.split(f"[{STOPS}\n]", text) if line]


def form(text):
    """The name of a poem's form."""
    found = lines(text)
    sizes = {len(line) for line in found}
    return FORMS.get((len(found), sizes.pop()), "詩") if len(sizes) == 1 else "詩"


def texts(folder):
    """Yield the texts of the package: poems of at most 128 characters whose title has at most 16."""
    for path in sorted((folder / "dist" / "quantangshi").glob("poet.*.json")):
        for poem in json.loads(path.read_text(encoding="utf-8")):
            body = "\n".join(poem["paragraphs"]).strip()
            title = re.sub(r"[（(].*", "", poem["title"]).split()
            text = f"{form(body)}《{title[0] if title else UNTITLED}》\n{body}"
            # Notes of the editors stand in brackets, lost characters are squares.
            if body and KEPT.fullmatch(text) and len(text) <= 128:
                yield text


def prepare(args):
    """Write the texts in random order, and the tokenizer of their characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    found = sorted(set(texts(args.package)))
    if not found:
        sys.exit(f"{args.package} has no poems: dist/quantangshi/poet.*.json are missing")
    counts = collections.Counter(itertools.chain.from_iterable(found))
    names = sorted(counts, key=lambda one: (-counts[one], one))[: args.characters - 1]
    known = set(names)
    kept = [text for text in found if known.issuperset(text)]
    random.Random(0).shuffle(kept)
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "poems.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in kept)
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate([END, *names])}))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([END])
    made.save(str(args.out / "tokenizer.json"))
    print(
        f"{len(kept):,} poems, {sum(map(len, kept)):,} characters; {len(found) - len(kept):,} poems are left out, "
        f"which have characters that are not among the {len(names):,} most frequent ones"
    )
    for name, count in collections.Counter(text.split("《")[0] for text in kept).most_common():
        print(f"{name} {count:,}")


def rhymes(found):
    """The last characters of the lines of a regulated poem that rhyme: the even ones."""
    return [line[-1] for line in found[1::2]]


def table(texts, least=3):
    """Pairs of characters that rhyme in at least ``least`` regulated poems."""
    pairs = collections.Counter()
    for text in texts:
        if text[:2] in FORMS.values():
            pairs.update(itertools.combinations(sorted(set(rhymes(lines(body_of(text))))), 2))
    return {pair for pair, count in pairs.items() if count >= least}


def body_of(text):
    """The lines of a text, without its form and title."""
    return text.partition("》")[2]


def judge(texts, known):
    """Shares of poems with the lines of their form, of pairs of rhyming lines in the table, and of whole poems.

    A pair rhymes if the ends of both lines are different characters and the table has them.
    """
    fits = [text for text in texts if form(body_of(text)) == text.partition("《")[0]]
    pairs = [list(itertools.combinations(rhymes(lines(body_of(text))), 2)) for text in fits]
    right = [[one != other and tuple(sorted((one, other))) in known for one, other in found] for found in pairs]
    flat = list(itertools.chain.from_iterable(right))
    shares = len(fits) / len(texts), sum(flat) / max(1, len(flat)), sum(map(all, right)) / max(1, len(right))
    return "{:.1%} with the lines of the form, {:.1%} of their pairs of lines and {:.1%} of them rhyme".format(*shares)


def mixed(texts):
    """Poems whose lines are those of others of the same form, which rhyme by chance only."""
    random_, kinds = random.Random(0), collections.defaultdict(list)
    for text in texts:
        kinds[text[:2]].append(lines(body_of(text)))
    for name, found in kinds.items():
        for i in range(len(found)):
            yield f"{name}《》" + "，".join(random_.choice(found)[j] for j in range(len(found[i])))


def compressed(held, train):
    """Bits per character of texts by compressors: of these alone, and after the training texts."""
    import lzma

    import pyppmd

    def xz(raw):
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 27}]
        return len(lzma.compress(raw, filters=filters))

    def ppmd(raw):
        return len(pyppmd.compress(raw, max_order=ORDER, mem_size=1 << 30))

    raw, before = held.encode(), train.encode()
    for name, size in {"PPMd": ppmd, "xz": xz}.items():
        alone, after = size(raw), size(before + raw) - size(before)
        yield name, 8 * alone / len(held), 8 * after / len(held)


# Specs of equal numbers of weights: the width of the feed-forward network evens out what attention needs.
CANDIDATES = {
    "gated_deltanet(expand_v=1.0)": {"feedforward": 704},
    "rwkv7": {"feedforward": 704},
    "mamba": {"feedforward": 568},
    "ssd": {"feedforward": 536},
    "gated_deltanet(expand_v=1.0); gated_deltanet(expand_v=1.0); gated_deltanet(expand_v=1.0); softmax": {
        "feedforward": 728
    },
    "softmax": {"feedforward": 792, "positions": "rotary"},
}


def step_time(config, run):
    """CPU seconds of a step, and the number of weights."""
    import torch

    import longspan

    model = longspan.Decoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocab, (run.batch, run.length))
    segments = torch.arange(run.length).expand_as(tokens) // 60
    times = []
    for _ in range(6):
        begin = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=run.precision == "bf16"):
            loss = -model(tokens, targets=tokens, segments=segments)[0].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - begin)
    return sorted(times)[2], sum(weight.numel() for weight in model.parameters())


def compare(args):
    """Train candidates of equal size for equal CPU time, each with its whole schedule."""
    from dataclasses import replace

    import yaml

    import longspan
    from longspan.train import TrainConfig, fit, recipes

    recipe = yaml.safe_load(recipes.find("poems").read_text())
    config, run = longspan.DecoderConfig(**recipe["model"]), TrainConfig(**recipe["run"])
    run = replace(run, batch=args.batch, precision=args.precision)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.specs or CANDIDATES:
        one = replace(config, attention=name, **CANDIDATES[name])
        seconds, weights = step_time(one, run)
        steps = max(10, int(args.seconds / seconds))
        out = args.out / f"{list(CANDIDATES).index(name)}"
        given = replace(
            run, data=f"tokens:{args.tokens}", steps=steps, warmup=steps // 10, decay=steps,
            evaluate_every=steps, save_every=steps, evaluate_examples=128, out=str(out), logger="csv",
        )  # fmt: skip
        result = fit(one, given, progress=False)
        print(
            f"{name}: {weights:,} weights, {seconds:.2f} CPU s per step, {steps:,} steps, "
            f"{result.bits['validation']:.3f} bits/token of validation",
            flush=True,
        )


def bits(model, codec, texts):
    """Bits per character, each text with its end."""
    import torch

    nats = characters = 0
    with torch.no_grad():
        for i in range(0, len(texts), 64):
            rows = [[*codec.encode(text), *codec.ends] for text in texts[i : i + 64]]
            tokens, mask = padded(rows)
            log_probs = model.likelihood.log_prob(model(model.shift(tokens))[0], tokens)
            nats -= float(log_probs.double()[mask].sum())
            characters += sum(map(len, rows))
    return nats / characters / math.log(2)


def padded(rows):
    """Rows of tokens as a tensor (B,N) and a mask of real tokens."""
    import torch

    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return tokens, torch.arange(width) < torch.tensor([[len(row)] for row in rows])


def draw(model, codec, prompts, seed, temperature):
    """Return one poem per prompt, drawn in one batch, and the characters per second of processor time."""
    import longspan

    tokens, mask = padded([codec.encode(prompt) for prompt in prompts])
    begin = time.process_time()
    new = longspan.generate(
        model, tokens, mask=mask, max_new_tokens=96, stop=codec.ends[0], seed=seed, temperature=temperature
    )
    seconds = time.process_time() - begin
    found = [codec.decode(row) for row in new.tolist()]
    return [prompt + text for prompt, text in zip(prompts, found, strict=True)], sum(map(len, found)) / seconds


def measure(args):
    """Print bits per character of the model and of compressors, and the shares of drawn poems with form and rhyme."""
    import longspan
    from longspan.models import pretrained
    from longspan.serving import hub
    from longspan.serving.tokenized import Tokenized

    own = pretrained.is_pretrained_name(args.model)
    model = pretrained.load(args.model) if own else longspan.load(args.model)
    codec = Tokenized(model.tokenizer, ends=hub.ends(model.tokenizer, END))
    every = [json.loads(line)["text"] for line in args.texts.read_text(encoding="utf-8").splitlines()]
    train, held = every[: len(every) * 9 // 10], every[-args.held :]
    print(f"{args.model}: {bits(model, codec, held):.3f} bits per character on {len(held):,} poems it has not read")
    if not own:
        longspan.quantize(model, "int8")
        print(f"int8: {bits(model, codec, held):.3f} bits per character")
    if args.compressors:
        for name, alone, after in compressed("\n".join(held), "\n".join(train)):
            print(f"{name}: {alone:.3f} bits per character of the same poems, {after:.3f} after the training poems")
    known = table(train)
    people = [text for text in held if text[:2] in FORMS.values()]
    print(f"poems of people: {judge(people, known)}")
    print(f"lines of several poems: {judge(list(mixed(people)), known)}")
    titles = [re.search("《.*?》\n", text)[0] for text in held[: args.poems]]
    for name in FORMS.values():
        texts, speed = draw(model, codec, [name + title for title in titles], 0, args.temperature)
        print(f"{name}: {judge(texts, known)}; {speed:,.0f} characters per CPU s in a batch of {len(texts)}")
        print(texts[0])


def load(args):
    """Ask a server for poems, all at the same time, and print the characters per second."""
    import asyncio
    import subprocess

    command = [sys.executable, "-m", "longspan", "serve", args.model, "--port", "0", "--no-playground"]
    command += ["--slots", str(args.streams), "--queue", str(args.streams)]

    async def ask(port, i):
        body = json.dumps(
            {"prompt": "七律《春夜》\n", "max_tokens": 96, "temperature": 0.7, "seed": i, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        found = ""
        while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
            if line.startswith(b"data: {"):
                found += json.loads(line[6:])["choices"][0]["text"]
        writer.close()
        return found

    async def every(port):
        return await asyncio.gather(*(ask(port, i) for i in range(args.streams)))

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(re.search(r":(\d+)/v1", server.stdout.readline())[1])
            begin = time.perf_counter()
            found = asyncio.run(every(port))
            seconds = time.perf_counter() - begin
        finally:
            server.terminate()
    print(f"{args.streams} streams over HTTP: {sum(map(len, found)) / seconds:,.0f} characters/s, {seconds:.1f} s")
    print(f"poems: {sum(form(text) == '七律' for text in found) / len(found):.1%} with the lines of the form")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("prepare", description="Make texts and a tokenizer.")
    one.add_argument("package", type=Path, help="the unpacked npm package chinese-poetry")
    one.add_argument("--out", type=Path, default=Path("poems"), help="folder to write; default: %(default)s")
    one.add_argument("--characters", type=int, default=6000, help="tokens of the tokenizer; default: %(default)s")
    one.set_defaults(run=prepare)
    two = commands.add_parser("compare", description="Train candidates of equal size for equal processor time.")
    two.add_argument("--tokens", type=Path, default=Path("poems/tokens"), help="default: %(default)s")
    two.add_argument("--specs", nargs="+", choices=CANDIDATES, metavar="SPEC", help="default: all")
    two.add_argument("--seconds", type=float, default=240.0, help="processor time of each; default: %(default)s")
    two.add_argument("--batch", type=int, default=8, help="examples per step; default: %(default)s")
    two.add_argument("--precision", default="bf16", help="as run.precision; default: %(default)s")
    two.add_argument("--out", type=Path, default=Path("runs/poems-compare"), help="default: %(default)s")
    two.set_defaults(run=compare)
    three = commands.add_parser("measure", description="Measure a model.")
    three.add_argument("model", nargs="?", default="poems", help="a run, or a pretrained model; default: %(default)s")
    three.add_argument("--texts", type=Path, default=Path("poems/poems.jsonl"), help="default: %(default)s")
    three.add_argument("--held", type=int, default=2000, help="last texts that are measured; default: %(default)s")
    three.add_argument("--poems", type=int, default=256, help="poems drawn of each form; default: %(default)s")
    three.add_argument("--temperature", type=float, default=0.7, help="default: %(default)s")
    three.add_argument("--no-compressors", dest="compressors", action="store_false", help="leave out xz and PPMd")
    three.set_defaults(run=measure)
    four = commands.add_parser("load", description="Ask a server for many poems at the same time.")
    four.add_argument("model", nargs="?", default="poems", help="a run, or a pretrained model; default: %(default)s")
    four.add_argument("--streams", type=int, default=256, help="poems; default: %(default)s")
    four.set_defaults(run=load)
    args = parser.parse_args(words)
    args.run(args)


if __name__ == "__main__":
    main()
