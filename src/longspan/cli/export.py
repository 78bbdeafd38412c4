"""``longspan export``: export a trained decoder to ONNX, or a model of transformers to GGUF."""

import os
from pathlib import Path

from .parser import MODEL, Parser, make, model_help


def parser() -> Parser:
    parser = make(
        "export",
        "Export a trained decoder to one ONNX graph for prefill and decode steps, with dynamic batch size and length. "
        "Each recurrent layer becomes one LinearAttention node. The file is written only after the outputs of "
        "onnxruntime match those of the model. The tokenizer of a model that has one is written next to it, as "
        "NAME.tokenizer.json.\n\nWith --gguf, write a hybrid or recurrent model of transformers, such as one that was "
        "fine-tuned, as a GGUF file, which longspan and llama.cpp read.",
        "longspan export runs/digits digits.onnx",
        "longspan export mnist mnist.onnx --domain ai.onnx",
        "longspan export tuned-qwen tuned.gguf --gguf --weights q8_0",
    )
    parser.add_argument("folder", type=str, metavar=MODEL, help=model_help("mnist, text"))
    parser.add_argument("file", type=str, metavar="FILE", help="the file to write; an existing file is replaced")
    parser.add_text(
        "--domain",
        "DOMAIN",
        "operator domain of LinearAttention: com.microsoft, which onnxruntime has a kernel for, or ai.onnx, the "
        "standard",
        default="com.microsoft",
    )
    parser.add_flag("--gguf", "write a GGUF file; MODEL is a folder that save_pretrained of transformers has written")
    parser.add_text(
        "--weights", "FORMAT", "format of the weights in a GGUF file: f32, f16, q8_0 or q4_0", default="f32"
    )
    return parser


def run(args) -> int:
    return _to_gguf(args) if args.gguf else _to_onnx(args)


def _to_gguf(args) -> int:
    from .._utils import atomic_io
    from .._utils.spec import known
    from ..compat import gguf
    from ..serving import hub

    if args.domain != "com.microsoft":
        raise ValueError("--domain is an option of ONNX files; leave it out with --gguf")
    atomic_io.check_output(Path(os.path.abspath(args.file)))
    if gguf.is_file(args.folder) or not hub.is_foreign(args.folder):
        raise ValueError(f"{args.folder} has no config.json of transformers; --gguf writes models of such folders")
    known(args.weights, gguf.WEIGHTS, "format of weights")
    model, texts = hub.load_model(args.folder)
    gguf.save(model, args.file, weights=args.weights, **texts)
    print(f"{args.file}: {model.config.model_type}, weights in {args.weights}, {os.path.getsize(args.file):,} bytes")
    if "tokenizer" not in texts:
        print("written without a tokenizer, since the folder has no tokenizer.json")
    return 0


def _to_onnx(args) -> int:
    if args.weights != "f32":
        raise ValueError("--weights is an option of GGUF files; pass --gguf")
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
