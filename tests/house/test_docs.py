"""The docs: they build without warnings, their Python runs, and their lists are complete."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longspan
from longspan import testing
from longspan.attention.base import REGISTRY, own_options
from longspan.compat.transformers.record import NEWEST
from longspan_lab.tools import architecture, laws, models_page, performance, scaling, sizing, tree
from longspan_lab.tools import blocks as tools

ROOT = Path(__file__).parents[2]
DOCS, CONTRIBUTING = ROOT / "docs", ROOT / "CONTRIBUTING.md"
MADE = ("mechanisms.md", "files.md", "cli.md", "configs.md")  # by conf.py
WRITTEN = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if page.name not in ("replace-transformer-encoder.md", *MADE) and page.parent.name != "mechanisms"
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The docs, built as ``make docs`` builds them."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip('building the pages needs: pip install "longspan[docs]"')
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", str(out / "trees"), str(DOCS), str(out)]
    result = subprocess.run(build, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.full
def test_every_mechanism_has_a_row_and_a_section(site):
    table = (DOCS / "reference" / "mechanisms.md").read_text(encoding="utf-8")
    for name in longspan.list_mechanisms():
        cls = REGISTRY[name]
        (row,) = [line for line in table.splitlines() if line.startswith(f"| [`{name}`]")]
        assert cls.paper in row
        assert all(form in row for form in cls.directions)
        page = (DOCS / "reference" / "mechanisms" / f"{cls.family}.md").read_text(encoding="utf-8")
        assert f"\n## {name}\n" in page
        assert f"mechanisms/{cls.family}.md#{name.replace('_', '-')}" in row
        assert all(f'longspan check "{spec}"' in page for spec in cls.examples)
        assert all(f"| `{option}` | `{p.default!r}` | " in page for option, p in own_options(cls).items())
        html = (site / "reference" / "mechanisms" / f"{cls.family}.html").read_text(encoding="utf-8")
        for equation in cls.equations:
            assert all(part in page for part in equation.split(r" \quad "))
        assert f'id="{name.replace("_", "-")}"' in html


@pytest.mark.full
def test_no_formula_of_the_pages_is_left_as_it_is_typed(site):
    """A dollar sign outside of code is a formula that was not typeset."""
    for page in site.rglob("*.html"):
        text = re.sub(
            r"<(script|pre|style)\b.*?</\1>|<code\b.*?</code>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        text = re.sub(r'<(span|div) class="math[^"]*">.*?</\1>', "", text, flags=re.DOTALL)
        assert "$" not in re.sub(r"<[^>]*>", "", text), page.name


@pytest.mark.full
def test_formulas_are_set_by_the_browser_alone(site):
    """Formulas are MathML and pages load nothing from elsewhere, so that they work without a network."""
    elsewhere = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//[^"]*')
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert elsewhere.findall(html) == [], page.name
        assert html.count('class="math notranslate') == html.count("<math "), page.name
    # TeX has a space between a function and what it is of.
    html = (site / "reference" / "mechanisms" / "linear.html").read_text(encoding="utf-8")
    assert re.search(r'<mi>cos</mi>\s*<mo lspace="0" rspace="0.1667em">&ApplyFunction;</mo>\s*<m(i|sub)>', html)


@pytest.mark.full
def test_each_page_shows_the_version_of_a_chart_for_its_color_and_width(site):
    html = (site / "index.html").read_text(encoding="utf-8")
    shown = {Path(src).stem: set(names.split()) for src, names in _images(html)}
    colors, widths = {"": "only-light", "-dark": "only-dark"}, {"": "only-wide", "-narrow": "only-narrow"}
    for width, width_class in widths.items():
        for color, color_class in colors.items():
            assert shown[f"time-and-state{width}{color}"] >= {color_class, width_class}
    # A picture without versions is shown everywhere.
    html = (site / "how-to" / "generate-and-beam-search.html").read_text(encoding="utf-8")
    assert all("only-" not in names for _, names in _images(html))


def _images(html):
    """(source, classes) of each picture in the text of a page."""
    for tag in re.findall(r"<img [^>]*>", html):
        source, names = re.search(r'src="([^"]*)"', tag), re.search(r'class="([^"]*)"', tag)
        yield source[1], names[1] if names else ""


@pytest.mark.full
def test_every_file_is_on_the_page_of_files(site):
    page = (site / "reference" / "files.html").read_text(encoding="utf-8")
    for path in (path for package in tree.PACKAGES for path in package.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h") and path.name != "__init__.py":
            assert f">{path.name}<" in page


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.py", '"""What it is: all.\n\nMore."""', "What it is: all"),
        ("a.py", '"""One. Two."""', "One"),
        ("a.h", "// A head,\n// in two lines. More\n\n// other", "A head, in two lines"),
    ],
)
def test_a_file_is_described_by_its_first_sentence(name, text, sentence, tmp_path):
    (tmp_path / name).write_text(text)
    assert tree.phrase(tmp_path / name) == sentence


def test_a_file_without_a_first_sentence_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("import os\n")
    with pytest.raises(ValueError, match=r"a\.py"):
        tree.phrase(tmp_path / "a.py")


@pytest.mark.full
def test_every_public_name_is_on_an_api_page(site):
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "reference" / "api").glob("*.html"))
    names = [name for name in longspan.__all__ if not inspect.ismodule(getattr(longspan, name))]
    for module in (longspan.states, longspan.patterns, longspan.testing):
        here = module.__name__.removeprefix("longspan.")
        names += [f"{here}.{name}" for name in module.__all__ if callable(getattr(module, name))]
    names += [f"attention.{REGISTRY[name].__name__}" for name in longspan.list_mechanisms()]
    documented = set(re.findall(r'id="longspan\.([\w.]+)"', pages))
    # The same object under its shorter name.
    documented |= {f"testing.{name}" for name in documented}
    assert [name for name in names if name not in documented] == []


@pytest.mark.full
def test_every_page_is_in_the_site(site):
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).exists()


@pytest.mark.full
# torch.onnx.export calls a function of torch that torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_python_in_the_pages_runs(page, blocks):
    namespace = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), namespace)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_the_pages_import_what_is_public(page, blocks):
    """Imports come from the package itself, the mechanism classes, or subpackages with a page in the API reference."""
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                assert not node.module.startswith("longspan.") or node.module.startswith(
                    tuple(
                        f"longspan.{name}"
                        for name in (
                            "attention",
                            "compat",
                            "data",
                            "distributed",
                            "finetune",
                            "linearize",
                            "serving",
                            "train",
                        )
                    )
                )
                assert node.module != "longspan" or {name.name for name in node.names} <= {
                    *longspan.__all__,
                    "patterns",
                }


def encoder(blocks) -> str:
    (code,) = blocks(DOCS / "how-to" / "replace-transformer-encoder.md", "python")
    assert "torch.rand(10, 4000, 768)" in code
    return code


def test_the_encoder_of_the_slide_maps_a_smaller_batch(blocks):
    code = encoder(blocks).replace("10, 4000, 768", "2, 101, 768")
    namespace: dict = {}
    exec(compile(code, "encoder.md", "exec"), namespace)
    model = namespace["encoder"]
    assert namespace["y"].shape == (2, 101, 768)
    attentions = [block.attention for block in model.stack.blocks]
    assert len(attentions) == 12
    assert {(a.name, a.heads, a.dim // a.heads, a.causal) for a in attentions} == {("linear", 12, 64, False)}
    assert {block.feedforward.expand.out_features for block in model.stack.blocks} == {3072}


@pytest.mark.slow
def test_the_encoder_of_the_slide_maps_its_batch(blocks):
    namespace: dict = {}
    exec(compile(encoder(blocks), "encoder.md", "exec"), namespace)
    assert namespace["y"].shape == (10, 4000, 768)


@pytest.fixture
def newcomer(blocks, tmp_path, monkeypatch):
    """The mechanism of CONTRIBUTING, registered like the built-in ones, and removed afterwards.

    A class of this name may already be registered, by someone who tries the example.
    """
    (code,) = blocks(CONTRIBUTING, "python")
    path = tmp_path / "running_mean.py"
    path.write_text(code, encoding="utf-8")
    name = "longspan.attention.running_mean"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    before = dict(REGISTRY)
    REGISTRY.pop("running_mean", None)
    try:
        spec.loader.exec_module(module)
        yield "running_mean"
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)


@pytest.mark.full
def test_the_mechanism_of_contributing_obeys_every_law(newcomer):
    assert newcomer in longspan.list_mechanisms()
    report = testing.check_attention(newcomer, raises=False)
    assert report.ok, str(report)
    assert {row.law for row in report.rows if row.status == "passed"} >= {"parallel_is_recurrent", "state", "padding"}


def test_the_mechanism_of_contributing_takes_the_mean_of_what_came(newcomer):
    attention = longspan.build(newcomer, dim=2, heads=1).double()
    eye, zero = torch.eye(2), torch.zeros(2)
    attention.load_state_dict({"value.weight": eye, "value.bias": zero, "out.weight": eye, "out.bias": zero})
    x = torch.tensor([[[2.0, 0.0], [4.0, 3.0], [0.0, 6.0]]], dtype=torch.float64)
    y, _ = attention(x)
    assert y.tolist() == [[[2.0, 0.0], [3.0, 1.5], [2.0, 3.0]]]


NAMES = longspan.list_mechanisms()


def test_the_example_of_contributing_leaves_what_was_there(blocks):
    assert longspan.list_mechanisms() == NAMES
    assert all(cls.__module__ in sys.modules for cls in REGISTRY.values())


@pytest.mark.whole
@pytest.mark.parametrize("program", [architecture, laws, scaling, sizing], ids=lambda program: program.__name__)
def test_pages_are_what_their_programs_write(program):
    check_pages(program)


def check_pages(program):
    for page, content in program.PAGES.items():
        command = f"run: python -m longspan_lab.tools {program.__name__.rpartition('.')[2]}"
        assert page.read_text(encoding="utf-8") == tools.written(page, content), command


def test_sizes_are_those_of_the_model_in_the_package():
    assert "| `text` | 175 kB |" in sizing.table()


def test_a_block_is_placed_between_its_markers():
    page = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    assert tools.place(page, "x", "new") == "a\n<!-- x:begin -->\n\nnew\n\n<!-- x:end -->\nb\n"
    for text in ("none", "<!-- x:begin -->", "<!-- x:end --> <!-- x:begin -->"):
        with pytest.raises(ValueError, match="needs the markers <!-- x:begin --> and <!-- x:end -->"):
            tools.place(text, "x", "")


@pytest.mark.full
def test_the_tables_of_recurrent_models_are_written_by_their_script():
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < NEWEST:
        pytest.skip("older versions of transformers have fewer model types")
    check_pages(models_page)


def test_every_law_is_explained():
    text = (DOCS / "explanation" / "conformance-checks.md").read_text(encoding="utf-8")
    assert [law for law in testing.laws() if f"`{law}`" not in text] == []


def test_every_package_is_in_the_picture():
    product, lab = ({path.parent.name for path in package.glob("*/__init__.py")} for package in tree.PACKAGES)
    assert {name for layer in architecture.LAYERS for name, _ in layer} == product | {"longspan_lab"}
    assert set(architecture.LAB) == lab


def test_the_performance_pages_are_what_their_script_writes():
    text = performance.PAGE.read_text(encoding="utf-8")
    assert performance.page(text) == text
    assert performance.page(text.replace("/results/", "/nowhere/")) != text.replace("/results/", "/nowhere/")
    for machine in performance.MACHINES:
        page = performance.RAW / f"{machine}.md"
        assert page.exists() == bool(performance.names(machine))
        assert page.read_text(encoding="utf-8") == performance.raw(machine)
    for card in performance.cards():
        assert (performance.RAW / f"{card}.md").read_text(encoding="utf-8") == performance.gpu_page(card)
    measured = {path.stem for path in performance.RESULTS.rglob("*.json") if not path.stem.startswith("every")}
    assert measured <= {*performance.COMMANDS, performance.GPU}
