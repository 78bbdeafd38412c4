"""``longspan.compat``: code written for fast-transformers finds what it knows, under the name that it knows."""

import argparse
import ast
import copy
import importlib
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from longspan import compat
from longspan.compat.fast_transformers import attention, builders, masking
from longspan.compat.fast_transformers import attention_registry as registry
from longspan.compat.fast_transformers.absent import FUNCTIONS
from longspan.compat.fast_transformers.builders import (
    AttentionBuilder,
    RecurrentDecoderBuilder,
    RecurrentEncoderBuilder,
    TransformerDecoderBuilder,
    TransformerEncoderBuilder,
)
from longspan.compat.fast_transformers.feature_maps import Favor

ROOT = Path(__file__).parents[2]
PAGE = "docs/how-to/from-fast-transformers.md"


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


def small(**options):
    sizes = {"n_layers": 2, "n_heads": 2, "query_dimensions": 5, "value_dimensions": 3, "feed_forward_dimensions": 7}
    return sizes | options


# install and uninstall


def test_importing_longspan_does_not_install():
    importlib.import_module("longspan.compat.fast_transformers")
    assert "fast_transformers" not in sys.modules


@pytest.mark.parametrize("size", ["2, 29, 768", pytest.param("10, 4000, 768", marks=pytest.mark.slow)])
def test_the_lines_of_the_slide_run_unchanged(installed, size):
    lines = """
import torch
from fast_transformers.builders import TransformerEncoderBuilder
model = TransformerEncoderBuilder.from_kwargs(
    n_layers=12,
    n_heads=12,
    query_dimensions=64,
    value_dimensions=64,
    feed_forward_dimensions=3072,
    attention_type="linear",
).get()
y = model(torch.rand(10, 4000, 768))
""".replace("10, 4000, 768", size)
    namespace: dict = {}
    # With what a backward pass needs, the full size would take some 30 GB.
    with torch.set_grad_enabled("4000" not in size):
        exec(lines, namespace)
    assert str(tuple(namespace["y"].shape)) == f"({size})"
    assert namespace["y"].isfinite().all()


@pytest.mark.parametrize(
    "line",
    [
        "import fast_transformers.builders as builders",
        "from fast_transformers.masking import LengthMask, TriangularCausalMask, FullMask",
        "from fast_transformers.causal_product import causal_dot_product, CausalDotProduct",
        "import fast_transformers.causal_product.causal_product_cuda",
        "from fast_transformers.attention import AttentionLayer, LocalAttention, ReformerAttention",
        "from fast_transformers.attention.linear_attention import LinearAttention",
        "from fast_transformers.attention.causal_linear_attention import CausalLinearAttention, causal_linear",
        "from fast_transformers.attention.attention_layer import AttentionLayer",
        "from fast_transformers.attention.clustered_attention import ClusteredAttention",
        "from fast_transformers.attention.improved_clustered_attention import ImprovedClusteredAttention",
        "import fast_transformers.attention.improved_clustered_causal_attention as module",
        "from fast_transformers.feature_maps import elu_feature_map, ActivationFunctionFeatureMap",
        "from fast_transformers.feature_maps.fourier_features import orthogonal_random_matrix_, Favor",
        "from fast_transformers.feature_maps.base import FeatureMap",
        "from fast_transformers.attention_registry import AttentionRegistry, Optional, Int, Callable",
        "from fast_transformers.attention_registry.spec import Spec, Choice",
        "from fast_transformers.recurrent.attention import RecurrentCrossLinearAttention",
        "import fast_transformers.recurrent.attention.self_attention.linear_attention as module",
        "from fast_transformers.recurrent.transformers import RecurrentTransformerDecoderLayer",
        "from fast_transformers.recurrent._utils import check_state",
        "from fast_transformers.events import EventDispatcher, QKVEvent, AttentionEvent, IntermediateOutput",
        "from fast_transformers.events.filters import layer_name_contains, from_layer",
        "import fast_transformers.events.event_dispatcher as module",
        "from fast_transformers.utils import make_mirror",
        "from fast_transformers.weight_mapper import HugginfaceBertEncoderMapper",
        "from fast_transformers.transformers import TransformerDecoderLayer",
        "from fast_transformers.builders.transformer_builders import BaseTransformerEncoderBuilder",
        "from fast_transformers.hashing import compute_hashes, hash_cpu",
        "from fast_transformers.clustering.hamming import cluster, cluster_cpu",
        "from fast_transformers.aggregate import aggregate, broadcast, clustered_aggregate, clustered_broadcast",
        "from fast_transformers.sparse_product import sparse_dot_product, clustered_sparse_weighted_average",
    ],
)
def test_imports_of_foreign_code_resolve(installed, line):
    exec(line, {})


def test_an_unknown_module_is_not_found(installed):
    with pytest.raises(ModuleNotFoundError, match="fast_transformers.nothing"):
        importlib.import_module("fast_transformers.nothing")


def test_classes_are_the_same_by_both_names(installed):
    module = importlib.import_module("fast_transformers.attention.linear_attention")
    assert module.LinearAttention is attention.LinearAttention
    assert pickle.loads(pickle.dumps(module.LinearAttention)) is attention.LinearAttention


def test_uninstall_undoes_install_and_both_may_be_repeated():
    compat.install()
    compat.install()
    assert "fast_transformers.masking" in sys.modules
    compat.uninstall()
    compat.uninstall()
    assert [name for name in sys.modules if name.split(".")[0] == "fast_transformers"] == []


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A package that is really called fast_transformers."""
    folder = tmp_path / "fast_transformers"
    folder.mkdir()
    (folder / "__init__.py").write_text("real = True")
    (folder / "masking.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    compat.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "fast_transformers"]:
        del sys.modules[name]


def test_install_refuses_where_the_real_one_is_installed_or_imported(real):
    with pytest.raises(ValueError, match=r"fast_transformers is installed.*replace=True"):
        compat.install()
    assert "fast_transformers" not in sys.modules
    importlib.import_module("fast_transformers.masking")
    with pytest.raises(ValueError, match="fast_transformers is already imported"):
        compat.install()


def test_replace_takes_the_place_of_the_real_one_until_uninstall(real):
    theirs = importlib.import_module("fast_transformers.masking")
    compat.install(replace=True)
    assert importlib.import_module("fast_transformers.masking") is masking
    assert importlib.import_module("fast_transformers.builders") is builders
    compat.uninstall()
    assert importlib.import_module("fast_transformers.masking") is theirs
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fast_transformers.builders")


# What a command, a state adapter or a pool does with other libraries' models.
USERS = {
    Path("_api.py"),
    Path("adapt.py"),
    Path("cli/doctor.py"),
    Path("cli/export.py"),
    Path("cli/linearize.py"),
    Path("finetune/tuned.py"),
    Path("serving/__init__.py"),
    Path("serving/hub.py"),
    Path("serving/pool.py"),
    Path("serving/reader.py"),
    Path("serving/rows.py"),
    Path("serving/sessions.py"),
}


def test_nothing_else_imports_it():
    package = ROOT / "src" / "longspan"
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] == "compat" or path.relative_to(package) in USERS:
            assert path.relative_to(package).parts[0] == "compat" or "fast_transformers" not in path.read_text("utf-8")
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            ours = isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith("longspan"))
            if ours or isinstance(node, ast.Import):
                assert "compat" not in ast.unparse(node).replace(",", " ").replace(".", " ").split(), path


@pytest.mark.parametrize(
    "name", [f"{module}.{name}" for module, names in FUNCTIONS.items() for name in names] + ["aggregate.set_group"]
)
def test_native_functions_without_users_are_absent(installed, name):
    module, _, function = name.rpartition(".")
    absent = getattr(importlib.import_module(f"fast_transformers.{module}"), function)
    with pytest.raises(NotImplementedError, match=f"{name}.*{PAGE}"):
        absent(1, bits=2)
    assert absent.__name__ == function


# Registries and builders


def test_specs_return_canonical_values_or_refuse():
    assert registry.Int.get("3") == 3
    assert registry.Optional(registry.Float, 0.5).get(None) == 0.5
    assert registry.Choice(("a", "b")).check("a")
    assert not registry.Choice(("a", "b")).check("c")
    assert not registry.Callable.check(3)
    assert not registry.EventDispatcherInstance.check(3)
    assert [registry.Bool.get(x) for x in (True, 0, "False", "true")] == [True, False, False, True]
    assert not registry.Bool.check("maybe")
    assert registry.Optional(registry.Int, 3) == registry.Optional(registry.Int, 3)
    assert registry.Optional(registry.Int, 3) != registry.Optional(registry.Int)
    assert registry.Choice(("a",)) == registry.Choice(("a",))
    assert repr(registry.Optional(registry.Int, 3)) == "Optional[Int, 3]"


def test_a_registry_refuses_what_is_taken():
    ours = registry.Registry()
    ours.register("one", nn.Identity, [("size", registry.Int)])
    assert "one" in ours
    assert ours["one"] == (nn.Identity, ["size"])
    assert ours.keys == ["one"]
    with pytest.raises(ValueError, match="'one'.*Identity"):
        ours.register("one", nn.Linear, [])
    with pytest.raises(ValueError, match="'size'.*Int.*Float"):
        ours.register("two", nn.Linear, [("size", registry.Float)])
    assert "two" not in ours
    with pytest.raises(ValueError, match="'x'.*'size'.*Int"):
        ours.validate_parameter("size", "x")
    with pytest.raises(ValueError, match="'other'.*size"):
        ours.validate_parameter("other", 1)


class Own(nn.Module):
    """An attention as a user would register it: each query's own value, scaled."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, queries, keys, values, attn_mask, query_lengths, key_lengths):
        assert key_lengths.lengths.tolist() == [queries.shape[1]] * len(queries)
        return (self.factor * values).contiguous()


def test_an_attention_of_ones_own_is_registered_and_built(monkeypatch):
    monkeypatch.setattr(registry.AttentionRegistry, "_entries", dict(registry.AttentionRegistry._entries))
    monkeypatch.setattr(registry.AttentionRegistry, "_specs", dict(registry.AttentionRegistry._specs))
    registry.AttentionRegistry.register("own", Own, [("factor", registry.Float)])
    model = TransformerEncoderBuilder.from_kwargs(**small(attention_type="own", factor="2")).get()
    assert model.layers[0].attention.inner_attention.factor == 2.0
    assert model(torch.randn(3, 5, 6)).shape == (3, 5, 6)
    with pytest.raises(ValueError, match="None.*'factor'"):
        TransformerEncoderBuilder.from_kwargs(**small(attention_type="own")).get()


def test_defaults_are_those_of_the_original():
    builder = TransformerEncoderBuilder()
    assert {name: getattr(builder, name) for name in builder.defaults} == {
        "n_layers": 4,
        "n_heads": 4,
        "query_dimensions": 64,
        "value_dimensions": 64,
        "feed_forward_dimensions": 1024,
        "model_dimensions": 256,
        "dropout": 0.1,
        "activation": "relu",
        "final_normalization": True,
        "event_dispatcher": "",
        "attention_type": "full",
    }
    decoder = RecurrentDecoderBuilder.from_kwargs(n_heads=3, value_dimensions=5)
    found = {name: getattr(decoder, name) for name in decoder.defaults if "attention" in name or "cross" in name}
    assert found == {
        "self_attention_type": "full",
        "cross_attention_type": "full",
        "cross_n_heads": 3,
        "cross_query_dimensions": 64,
        "cross_value_dimensions": 5,
        "cross_model_dimensions": 15,
    }


def test_the_default_size_of_queries_reaches_the_feature_map():
    for cls in (TransformerEncoderBuilder, RecurrentEncoderBuilder):
        model = cls.from_kwargs(attention_type="linear", feature_map=Favor.factory(n_dims=6), n_layers=1).get()
        assert model.layers[0].attention.inner_attention.feature_map.omega.shape == (64, 3)


def test_parameters_reach_the_model_and_the_attention():
    builder = TransformerEncoderBuilder.from_dictionary(small(attention_type="conditional-full:linear"))
    builder.length_limit, builder.eps, builder.attention_dropout = 17, 0.25, 0.5
    builder.final_normalization = 0
    assert builder.attention.query_dimensions == 5
    model = builder.get()
    inner = model.layers[1].attention.inner_attention
    assert (inner.length_limit, inner.other_attention.eps, inner.full_attention.dropout.p) == (17, 0.25, 0.5)
    assert model.norm is None
    assert builder.get() is not model
    assert builder.get().layers[0] is not builder.get().layers[1]
    assert "length_limit=17" in repr(builder.attention)
    assert copy.deepcopy(builder).attention.length_limit == 17
    wide = TransformerEncoderBuilder.from_kwargs(**small(model_dimensions=11)).get()
    assert wide(torch.randn(2, 3, 11)).shape == (2, 3, 11)


def test_cross_attention_has_separate_sizes():
    options = small(cross_n_heads=4, cross_query_dimensions=7, cross_value_dimensions=2, cross_model_dimensions=9)
    favor = {"feature_map": Favor.factory(n_dims=6), "cross_attention_type": "linear"}
    for cls in (TransformerDecoderBuilder, RecurrentDecoderBuilder):
        layer = cls.from_kwargs(**options, **favor, self_attention_type="causal-linear").get().layers[0]
        assert layer.cross_attention.inner_attention.feature_map.omega.shape == (7, 3)
        assert layer.self_attention.inner_attention.feature_map.omega.shape == (5, 3)
        assert layer.cross_attention.key_projection.weight.shape == (28, 9)
        assert layer.cross_attention.out_projection.weight.shape == (6, 8)
    model = TransformerDecoderBuilder.from_kwargs(**options).get()
    assert model(torch.randn(2, 5, 6), torch.randn(2, 3, 9)).shape == (2, 5, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nothing": 1}, "'nothing'"),
        ({"attention": 1}, "'attention'"),
        ({"activation": "tanh"}, "activation='tanh'.*relu, gelu"),
        ({"attention_type": "quick"}, "attention_type='quick'.*linear"),
        ({"attention_dropout": "much"}, "'much'.*'attention_dropout'"),
    ],
)
def test_builders_refuse(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerEncoderBuilder.from_kwargs(**options)


def test_a_namespace_may_hold_more_than_the_builder_knows():
    args = argparse.Namespace(n_layers=1, learning_rate=0.1)
    assert TransformerEncoderBuilder.from_namespace(args).n_layers == 1
    assert TransformerEncoderBuilder.from_kwargs(strict=False, n_layers=1, learning_rate=0.1).n_layers == 1
    with pytest.raises(ValueError, match="'learning_rate'"):
        TransformerEncoderBuilder.from_namespace(args, strict=True)
    with pytest.raises(AttributeError, match="'learning_rate'"):
        TransformerEncoderBuilder().learning_rate = 0.1
    with pytest.raises(AttributeError, match="attention"):
        TransformerEncoderBuilder().attention = 1


def test_attention_builders_compose_and_refuse():
    builder = AttentionBuilder.from_kwargs(query_dimensions=5)
    assert {"full", "linear", "causal-linear", "local", "aft-full", "clustered"} <= set(builder.available_attentions)
    assert builder.validate_attention_type("conditional-full:linear")
    assert not builder.validate_attention_type("conditional-full:quick")
    assert isinstance(builder.get("conditional-full:linear").other_attention, attention.LinearAttention)
    with pytest.raises(ValueError, match="'linear,full'.*2"):
        builder.get("linear,full")
    with pytest.raises(ValueError, match="'quick'.*linear"):
        builder.get("quick")
    with pytest.raises(ValueError, match="None.*'query_dimensions'"):
        AttentionBuilder().get("linear")
    with pytest.raises(AttributeError, match="'clarity'"):
        builder.clarity = 1
    with pytest.raises(AttributeError, match="'topk'"):
        _ = builder.topk
