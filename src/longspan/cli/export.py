"""``longspan export``: export a trained decoder to ONNX."""

from pathlib import Path

from .parser import MODEL, Parser, make, model_help


def parser() -> Parser:
    parser = make(
        "export",
        "Export a trained decoder to one ONNX graph for prefill and decode steps, with dynamic batch size and length. "
        "Each recurrent layer becomes one LinearAttention node. The file is written only after the outputs of "
        "onnxruntime match those of the model. The tokenizer of a model that has one is written next to it, as "
        "NAME.tokenizer.json.",
        "longspan export runs/digits digits.onnx",
        "longspan export mnist mnist.onnx --domain ai.onnx",
    )
    parser.add_argument("folder", type=str, metavar=MODEL, help=model_help("mnist, text"))
    parser.add_argument("file", type=str, metavar="FILE", help="the ONNX file to write; an existing file is replaced")
    parser.add_argument(
        "--domain",
        type=str,
        default="com.microsoft",
        metavar="DOMAIN",
        help="operator domain of LinearAttention: com.microsoft, which onnxruntime has a kernel for, or ai.onnx, the "
        "standard",
    )
    return parser


def run(args) -> int:
    from ..compat import onnx
    from ..models import checkpoint, pretrained
    from ..models.decoder import Decoder

    model = pretrained.load(args.folder) if pretrained.is_pretrained_name(args.folder) else checkpoint.load(args.folder)
    if not isinstance(model, Decoder):
        raise ValueError(f"{args.folder} holds a {type(model).__name__}; only a decoder can be exported")
    found = onnx.export(model, args.file, domain=args.domain)
    if model.tokenizer:
        tokenizer = Path(args.file).with_suffix(".tokenizer.json")
        checkpoint.write_text(tokenizer, model.tokenizer)
    recurrent = sum(count for name, count in found["nodes"].items() if name.endswith("LinearAttention"))
    print(f"{args.file}: {sum(found['nodes'].values())} nodes, {recurrent} of them LinearAttention")
    print(f"inputs   {', '.join(found['inputs'])}")
    print(f"outputs  {', '.join(found['outputs'])}")
    if model.tokenizer:
        print(f"tokenizer: {tokenizer}")
    print(f"largest difference between model and onnxruntime: {found['difference']:.1e}")
    return 0
