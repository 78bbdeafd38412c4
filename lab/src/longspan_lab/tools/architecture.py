"""Draw the packages of longspan by layer: ``python -m longspan_lab.tools architecture``.

It writes docs/images/architecture.svg, and the list of packages in docs/explanation/architecture.md, between the two
markers there. The colors are readable on light and on dark pages.
"""

from html import escape

from . import DOCS

# The packages of longspan-lab, which are above all others: what each holds.
LAB = {
    "cli": "commands",
    "tools": "pages of the docs, packaged models",
    "experiments": "published results, the demo",
    "bench": "time and memory",
    "data": "data sets of experiments",
    "speech": "corpora of experiments",
    "_utils": "plots, tables",
}
# From the top layer down: packages, each with what it holds. A package imports from its own layer and those below.
LAYERS = (
    (("longspan_lab", "benchmarks, published results, the demo"),),
    (
        ("cli", "commands"),
        ("compat", "other libraries"),
        ("serving", "many streams"),
        ("finetune", "trained models"),
        ("linearize", "softmax models"),
    ),
    (
        ("generation", "sampling, beam search"),
        ("train", "loop, objectives, runs"),
        ("distributed", "several processes"),
        ("testing", "conformance checks"),
    ),
    (("models", "configs, stacks, decoder, encoder, checkpoints"),),
    (("attention", "one mechanism, one file"), ("data", "data sets by name"), ("speech", "audio, features, CTC")),
    (("modules", "norms, feed-forward, positions"), ("states", "recurrent states, KV caches")),
    (("ops", "functions on tensors, C++ kernels"), ("patterns", "which keys a query sees")),
    (("_utils", "specs, files, locks, progress"),),
)
COLORS = ("#5f6b7a", "#4f6d8f", "#4f7f7a", "#5b7a4c", "#a0602a", "#7d5f94", "#94566a", "#6b6b6b")
WIDTH, LEFT, HEIGHT, GAP = 760, 44, 58, 10


def draw() -> str:
    """The picture as SVG text."""
    total = len(LAYERS) * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" role="img"'
        ' font-family="system-ui, sans-serif">',
        "<title>The packages of longspan by layer</title>",
        "<desc>Eight layers. A package imports from its own layer and from the layers below it.</desc>",
        '<g stroke="#808080" stroke-width="2" fill="none">',
        f'<path d="M 22 {GAP} V {total - GAP - 4}"/><path d="M 15 {total - GAP - 14} L 22 {total - GAP - 4}'
        f' L 29 {total - GAP - 14}"/></g>',
        f'<text x="12" y="{total / 2:g}" fill="#808080" font-size="13" text-anchor="middle"'
        f' transform="rotate(-90 12 {total / 2:g})">imports</text>',
    ]
    for number, (layer, color) in enumerate(zip(LAYERS, COLORS, strict=True)):
        top = GAP + number * (HEIGHT + GAP)
        width = (WIDTH - LEFT - GAP * len(layer)) / len(layer)
        for place, (name, holds) in enumerate(layer):
            left = LEFT + place * (width + GAP)
            middle = left + width / 2
            parts += [
                f'<rect x="{left:g}" y="{top}" width="{width:g}" height="{HEIGHT}" rx="6" fill="{color}"/>',
                f'<text x="{middle:g}" y="{top + 25}" fill="#ffffff" font-size="16" font-weight="600"'
                f' text-anchor="middle">{escape(name)}</text>',
                f'<text x="{middle:g}" y="{top + 44}" fill="#ffffff" font-size="13" text-anchor="middle">'
                f"{escape(holds)}</text>",
            ]
    return "\n".join((*parts, "</svg>", ""))


def tree() -> str:
    """The packages as a list, the top layer first."""
    parts = {"lab/src/longspan_lab/": LAB.items(), "src/longspan/": (part for layer in LAYERS[1:] for part in layer)}
    lines = [
        line for root, part in parts.items() for line in (root, *(f"  {name + '/':<15}{holds}" for name, holds in part))
    ]
    return "\n".join(("```text", *lines, "```"))


PAGES = {
    DOCS / "images" / "architecture.svg": draw,
    DOCS / "explanation" / "architecture.md": {"packages": tree},
}
