"""``longspan export``: a trained decoder as an ONNX file."""

from .parser import Parser, make


def parser() -> Parser:
    parser = make(
        "export",
        "A trained decoder as an ONNX file that reads prompts and makes steps, with any number of rows and tokens. "
        "Each recurrent layer is one LinearAttention node; onnxruntime must give the model's answers before it is "
        "written.",
        "longspan export runs/digits digits.onnx",
        "longspan export mnist mnist.onnx --domain ai.onnx",
    )
    parser.add_argument("folder", type=str, help="a run, a checkpoint, or a model inside longspan by its name")
    parser.add_argument("file", type=str, help="the ONNX file to write; an older one is replaced")
    parser.add_argument(
        "--domain",
        type=str,
        default="com.microsoft",
        help="where the node is from: com.microsoft, for which onnxruntime has a kernel, or ai.onnx, the standard",
    )
    return parser


def run(args) -> int:
    from ..compat import onnx
    from ..models import checkpoint, pretrained
    from ..models.decoder import Decoder

    model = pretrained.load(args.folder) if pretrained.is_pretrained_name(args.folder) else checkpoint.load(args.folder)
    if not isinstance(model, Decoder):
        raise ValueError(f"{args.folder} holds a {type(model).__name__}; only a decoder has a step to be exported")
    found = onnx.export(model, args.file, domain=args.domain)
    recurrent = sum(count for name, count in found["nodes"].items() if name.endswith("LinearAttention"))
    print(f"{args.file}: {sum(found['nodes'].values())} nodes, {recurrent} of them LinearAttention")
    print(f"inputs   {', '.join(found['inputs'])}")
    print(f"outputs  {', '.join(found['outputs'])}")
    print(f"onnxruntime's answers differ by at most {found['difference']:.1e}")
    return 0
