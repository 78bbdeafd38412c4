"""The native kernels for whole sequences against the definition in float64: values, gradients, and what they leave."""

import pytest
import torch
from torch import Tensor

import longspan
from longspan import backend
from longspan.ops import linear
from longspan.ops.linear.features import MAPS
from longspan.ops.native.call import available, why_not
from longspan.testing.pairs import all_pairs

pytestmark = [
    pytest.mark.skipif(not available(), reason="there are no native kernels here"),
    # Dynamo itself makes an instance of a traced autograd.Function, and torch warns of that.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

# Where relu leaves few weights, o = n / (d + eps) loses digits; so eps is not tiny.
EPS = 1e-2
ROUNDED = 5e-6  # float32, of the largest number: some 40 roundings, each of 2^-23


def operands(n, d=13, e=11, *, b=2, h=3, dtype=torch.float32, seed=0) -> list[Tensor]:
    """q, k, v as a model has them, heads side by side per token, a state, whose sums are positive, and upstream
    gradients of the output and the last state."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (torch.randn(b, n, h, c, generator=generator).transpose(1, 2).to(dtype) for c in (d, d, e, e))
    state = torch.rand(b, h, d, e + 1, generator=generator)
    return [q, k, v, state, grad, torch.randn(b, h, d, e + 1, generator=generator)]


def arguments(kind: str, n: int, b: int = 2) -> dict[str, Tensor]:
    """A mask with a row that begins with padding; segments of many lengths, one token among them, and one long row."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(b, n, generator=generator) < 0.6
    mask[-1, : n // 3] = False
    segments = (torch.rand(b, n, generator=generator) < 0.1).long().cumsum(1)
    segments[-1] = torch.arange(n) >= n - 2
    every = {"mask": mask, "segments": segments}
    return {name: t for name, t in every.items() if kind in (name, "both")}


def call(q, k, v, state=None, *, feature_map="elu", name="native", **options):
    with backend(name):
        return linear.named(q, k, v, state=state, causal=True, feature_map=feature_map, eps=EPS, **options)


def everything(inputs: list[Tensor], upstream: list[Tensor], **options) -> list[Tensor]:
    """Both outputs and the gradients of all inputs."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    outputs = call(*inputs, **options)
    assert outputs[0].dtype is inputs[2].dtype
    return [t.detach() for t in outputs] + list(torch.autograd.grad(outputs, inputs, upstream))


def definition(inputs, upstream, **options) -> list[Tensor]:
    inputs, upstream = ([t.double() for t in part] for part in (inputs, upstream))
    return everything(inputs, upstream, name="reference", **options)


def close(found, wanted, tolerance=ROUNDED):
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert x.shape == y.shape
        # A token that reads mostly itself reads the same for any query: dq is a difference of larger terms.
        error = (x.double() - y).abs().max() / y.abs().max().clamp(min=0.1)
        assert error <= tolerance, f"number {i} differs by {error:.1e} of its largest entry"


def equal(found, wanted):
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def same(inputs, upstream, tolerance=ROUNDED, **options):
    close(everything(inputs, upstream, **options), definition(inputs, upstream, **options), tolerance)


class TestEqualsTheDefinition:
    @pytest.mark.parametrize("feature_map", MAPS)
    @pytest.mark.parametrize("scale", [1e-3, 40.0])
    def test_small_and_large_numbers(self, feature_map, scale):
        """Maps are cut off at 30, where they are, and fall to nothing where they should."""
        q, k, v, state, grad, grad_state = operands(45)
        k = (k * scale).clamp(max=31.0)
        same([q, k, v, state], [grad, grad_state], feature_map=feature_map)

    @pytest.mark.parametrize(
        "row",
        all_pairs(count=(1, 2, 3), sizes=((1, 1), (1, 2), (2, 3), (3, 1), (1, 29)), kind=("plain", "mask", "segments")),
        ids=lambda row: "-".join(map(str, row.values())),
    )
    def test_threads(self, row, threads):
        """Heads are shared out, and tokens where heads are few; the same number of threads gives the same bits."""
        count, (b, h), kind = row.values()
        n = 1031 if h < 29 else 67  # 8 chunks of 32 for each thread, or too few to share out
        *inputs, grad, grad_state = operands(n, 5, 3, b=b, h=h)
        options = arguments(kind, n, b)
        threads(count)
        found = everything(inputs, [grad, grad_state], **options)
        equal(everything(inputs, [grad, grad_state], **options), found)
        close(found, definition(inputs, [grad, grad_state], **options))


class TestWhatIsReadAndKept:
    def test_a_number_that_is_none_stays_in_its_future_and_its_segment(self):
        q, k, v, *_ = operands(71)
        v[0, 1, 40] = float("nan")
        segments = (torch.arange(71) > 50).long().expand(2, -1)
        o, state = call(q, k, v, segments=segments)
        spoilt = o.isnan().any(-1)
        assert spoilt[0, 1, 40:51].all()
        assert spoilt.sum() == 11
        assert state.isfinite().all()

    def test_the_backward_pass_keeps_inputs_outputs_and_denominators(self):
        saved = {}

        def pack(x):
            saved[x.data_ptr()] = x.numel()
            return x

        inputs = [t.requires_grad_() for t in operands(257, 13, 11)[:4]]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            call(*inputs)
        assert sum(saved.values()) == 6 * 257 * (2 * 13 + 2 * 11 + 1) + 6 * 13 * 12


class TestDerivatives:
    @pytest.mark.parametrize(
        ("output", "which"), [(0, (0,)), (0, (1,)), (0, (2,)), (0, (3,)), (0, (0, 3)), (1, (1,)), (1, (2,)), (1, (3,))]
    )
    def test_only_what_is_asked_for(self, which, output):
        *inputs, grad, grad_state = operands(45)
        found = []
        for dtype, name in ((torch.float32, "native"), (torch.float64, "reference")):
            leaves = [t.to(dtype).requires_grad_(i in which) for i, t in enumerate(inputs)]
            result = call(*leaves, name=name)[output]
            upstream = (grad, grad_state)[output].to(dtype)
            found.append(torch.autograd.grad(result, [leaves[i] for i in which], upstream))
        close(*found)


class TestCompilers:
    @pytest.mark.parametrize("kind", ["plain", "both"])
    @pytest.mark.parametrize("given", [False, True], ids=["from nothing", "from a state"])
    def test_one_graph_keeps_the_operations(self, kind, given):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        *inputs, grad, grad_state = operands(45)
        inputs, options, seen = inputs if given else inputs[:3], arguments(kind, 45), []

        def keep(graph, _):
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return make_boxed_func(graph)

        expected = everything(inputs, [grad, grad_state], **options)
        torch._dynamo.reset()
        traced = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = traced(*leaves, **options)
        found = [*outputs, *torch.autograd.grad(outputs, leaves, [grad, grad_state])]
        equal(found, expected)
        assert seen.count("longspan.linear_forward.default") == 1
        assert seen.count("longspan.linear_backward.default") == 1

    @pytest.mark.parametrize("tokens", [1, 45])
    def test_an_exported_program_runs_without_them(self, tokens):
        module = longspan.build("linear", 24, 2)
        x, state = torch.randn(2, tokens, 24), module.init_state(2).sums

        class Call(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = module

            def forward(self, x, sums):
                y, after = self.inner(x, type(module.init_state(1))(sums))
                return y, after.sums

        with torch.no_grad():
            program = torch.export.export(Call(), (x, state))
            assert "longspan" not in str(program.graph)
            torch.testing.assert_close(program.module()(x, state), Call()(x, state), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("kind", ["plain", "both"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_operations_are_as_they_say(self, kind, dtype):
        q, k, v, state, grad, grad_state = operands(37, dtype=dtype)
        options = arguments(kind, 37)
        state = state if options else None
        given = state, options.get("mask"), options.get("segments")
        given = (q, k, v, *given, "elu", EPS, True, 0)
        operations = torch.ops.longspan
        torch.library.opcheck(operations.linear_forward, (*given, True))
        o, _, below = operations.linear_forward(*given, True)
        needed = [True] * 3 + [state is not None]
        torch.library.opcheck(operations.linear_backward, (grad, grad_state, *given, o, below, needed))


class TestWhatItCannotServe:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda q, k, v, s: (q.double(), k.double(), v.double(), s.double()), "they take float32 or bfloat16"),
            (
                lambda q, k, v, s: (q, k, v.bfloat16(), s),
                "they take float32 or bfloat16",
            ),
            (lambda q, k, v, s: (*(t[:, :, :0] for t in (q, k, v)), s), "there is nothing to compute"),
        ],
    )
    def test_is_refused_with_the_reason_and_left_to_torch(self, change, reason):
        inputs = change(*operands(5)[:4])
        with pytest.raises(ValueError, match=f"backend 'native' cannot serve this call of linear attention: {reason}"):
            call(*inputs)
        found, wanted = (call(*inputs, name=name) for name in ("auto", "torch"))
        equal(found, wanted)

    def test_operands_that_do_not_go_together(self):
        q, k, v, state, *_ = operands(5)
        with pytest.raises(ValueError, match="they take a state in float32"):
            call(q, k, v, state.double())
        for part in range(5):
            mixed = [q, k, v, state, torch.ones(2, 5, dtype=torch.bool)]
            mixed[part] = mixed[part].to("meta")
            with pytest.raises(ValueError, match="they are for the CPU"):
                call(*mixed[:4], mask=mixed[4])

    def test_bidirectional_attention(self):
        q, k, v, *_ = operands(5)
        with backend("native"), pytest.raises(ValueError, match="they are for causal attention"):
            longspan.linear_attention(q, k, v, causal=False)

    def test_tensors_without_memory(self):
        """They go to the torch path, which is made of operations that such tensors know."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils.flop_counter import FlopCounterMode

        with FakeTensorMode() as mode:
            inputs = operands(45)[:4]
            assert call(*inputs, name="auto")[0].shape == (2, 3, 45, 11)
        fakes = [mode.from_tensor(t) for t in operands(45)[:3]]
        assert why_not(*fakes, None, family="linear")
        with FlopCounterMode(display=False) as counter:
            call(*operands(45)[:4], name="auto")
        assert counter.get_total_flops() > 0
