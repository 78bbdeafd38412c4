"""Train a small language model of bytes with gated linear attention, then let it write.

    python examples/char_lm.py
    python examples/char_lm.py --text my.txt --steps 2000 --dim 256 --depth 4 --attention "gated_deltanet; softmax"

Without ``--text`` the model learns a nursery rhyme by heart. Training reads whole windows in parallel. Generation reads
one byte at a time and keeps a state of constant size.
"""

import argparse
import time
from pathlib import Path

import torch

import longspan

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", type=Path, help="a text file; default: a nursery rhyme")
parser.add_argument("--attention", default="gated_deltanet", help="any spec from `longspan list`; default: %(default)s")
parser.add_argument("--steps", type=int, default=200, help="training steps; default: %(default)s")
parser.add_argument("--length", type=int, default=256, help="bytes in a training window; default: %(default)s")
parser.add_argument("--batch", type=int, default=8, help="windows per step; default: %(default)s")
parser.add_argument("--dim", type=int, default=128, help="model width, a multiple of 4; default: %(default)s")
parser.add_argument("--depth", type=int, default=2, help="number of blocks; default: %(default)s")
parser.add_argument("--prompt", default="This is the dog", help="beginning of the generated text; default: %(default)r")
parser.add_argument("--tokens", type=int, default=300, help="bytes to generate; default: %(default)s")
parser.add_argument("--out", type=Path, help="folder for the trained model; default: it is not saved")
args = parser.parse_args()

RHYME = (
    ("house", "that Jack built"),
    ("malt", "that lay in"),
    ("rat", "that ate"),
    ("cat", "that killed"),
    ("dog", "that worried"),
    ("cow with the crumpled horn", "that tossed"),
    ("maiden all forlorn", "that milked"),
    ("man all tattered and torn", "that kissed"),
    ("priest all shaven and shorn", "that married"),
    ("cock that crowed in the morn", "that waked"),
)


def rhyme() -> str:
    """Return "The House That Jack Built", whose verses grow by one line each."""
    verses, verse = [], ""
    for i, (who, what) in enumerate(RHYME):
        verse = f"the {who} {what}" + (f"\nthe {verse[4:]}" if i else ".")
        verses.append(f"This is {verse}")
    return "\n\n".join(verses) + "\n\n"


torch.manual_seed(0)
text = args.text.read_bytes() if args.text else rhyme().encode()
text = text * (args.length // len(text) + 2)  # windows may wrap around a short text
data = torch.tensor(list(text))

config = longspan.DecoderConfig(
    dim=args.dim,
    depth=args.depth,
    heads=4,
    feedforward=4 * args.dim,
    attention=args.attention,
    positions="sinusoidal",
)
model = longspan.Decoder(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=args.steps)

begin = time.perf_counter()
for step in range(1, args.steps + 1):
    starts = torch.randint(len(data) - args.length, (args.batch,))
    tokens = torch.stack([data[i : i + args.length] for i in starts.tolist()])
    outputs, _ = model(model.shift(tokens))
    loss = -model.likelihood.log_prob(outputs, tokens).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % max(args.steps // 10, 1) == 0:
        print(f"step {step:4d}: {loss.item() / 0.6931:.3f} bits per byte, {time.perf_counter() - begin:.1f} s")

model.eval()
prompt = torch.tensor([list(args.prompt.encode())])
begin = time.perf_counter()
new = longspan.generate(model, prompt, max_new_tokens=args.tokens, temperature=0.3, seed=0)[0].tolist()
seconds = time.perf_counter() - begin
print(f"\n{args.prompt}{bytes(new).decode(errors='replace')}\n")
print(f"{args.tokens / seconds:.0f} bytes per second, state {longspan.states.nbytes(model.init_state(1)):,} bytes")
if args.out:
    longspan.save(model, args.out)
    print(f"saved in {args.out}; continue with: longspan generate {args.out} --prompt TEXT")
