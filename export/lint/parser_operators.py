"""The operators of TensorRT's ONNX parser, and what it does not take of them.

From the operator table of onnx-tensorrt for TensorRT 10.15 (opset 24); that of TensorRT 11 has not been compared.
"""

from collections.abc import Callable, Iterator

from onnx import NodeProto

from export.lint.lint_graph import DEFAULT_DOMAINS, LintGraph, Problem, attribute_of, error, warning

SUPPORTED_TABLE = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BlackmanWindow
Cast CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DeformConv
DepthToSpace DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather
GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample
GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax Identity If ImageScaler
InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop
LpNormalization LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression
NonZero Not OneHot Or PRelu Pad ParametricSoftplus Pow QuantizeLinear RMSNormalization RNN RandomNormal
RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign
RotaryEmbedding Round STFT ScaledTanh Scan Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin
Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh TensorScatter
ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
"""
UNSUPPORTED_TABLE = """
AffineGrid Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CenterCropPad Col2Im Compress
ConcatFromSequence DFT Det ImageDecoder MaxRoiPool MaxUnpool MelWeightMatrix Multinomial NegativeLogLikelihoodLoss
Optional OptionalGetElement OptionalHasElement RegexFullMatch SequenceAt SequenceConstruct SequenceEmpty
SequenceErase SequenceInsert SequenceLength SequenceMap SoftmaxCrossEntropyLoss SplitToSequence StringConcat
StringNormalizer StringSplit TfIdfVectorizer Unique
"""
SUPPORTED, UNSUPPORTED = frozenset(SUPPORTED_TABLE.split()), frozenset(UNSUPPORTED_TABLE.split())
DYNAMIC = frozenset({"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearConv", "QLinearMatMul"})
"""Operators that quantize while the model runs, or that have the quantization inside."""
DATA_DEPENDENT = frozenset({"NonZero", "NonMaxSuppression", "Loop", "If", "Scan"})

LIMITS: dict[str, tuple[Callable[[NodeProto], bool], str]] = {
    "Attention": (
        lambda node: (
            len(node.input) > 4 or len(node.output) > 1 or any(each.name == "softcap" for each in node.attribute)
        ),
        "past keys, further outputs and softcap",
    ),
    "GRU": (lambda node: attribute_of(node, "layout", 0) != 0, "layout 1"),
    "LSTM": (
        lambda node: attribute_of(node, "layout", 0) != 0 or attribute_of(node, "input_forget", 0) != 0,
        "layout 1 and input_forget",
    ),
    "LayerNormalization": (lambda node: any(node.output[1:]), "the outputs Mean and InvStdDev"),
    "MaxPool": (lambda node: any(node.output[1:]), "the output Indices"),
    "Resize": (lambda node: attribute_of(node, "antialias", 0) != 0, "antialiasing"),
    "ScatterND": (lambda node: read_text(node, "reduction") not in ("", "none"), "a reduction"),
    "TopK": (lambda node: attribute_of(node, "sorted", 1) != 1, "unsorted results"),
}
"""What the parser does not take of an operator that it knows: whether a node needs it, and what it is."""


def read_text(node: NodeProto, name: str) -> str:
    """Read a text attribute of a node; empty if it has none."""
    return next((bytes(each.s).decode(errors="replace") for each in node.attribute if each.name == name), "")


def check_domains(graph: LintGraph) -> Iterator[Problem]:
    """Find operators outside the ONNX standard, which need a plugin. The model's own functions are inlined."""
    functions = {(function.domain, function.name) for function in graph.model.functions}
    for node in graph.all_nodes():
        if node.domain not in DEFAULT_DOMAINS and (node.domain, node.op_type) not in functions:
            yield error(
                node,
                f"{node.op_type} of domain {node.domain!r} is not an ONNX operator, and TensorRT has it only with a "
                f"plugin. Write it with standard operators",
            )


def check_operators(graph: LintGraph) -> Iterator[Problem]:
    """Find operators that the parser refuses; a warning for those that its table does not list."""
    for node in standard_nodes(graph):
        if node.op_type in UNSUPPORTED:
            yield error(node, f"TensorRT's parser has no {node.op_type}. Replace it by other operators")
        elif node.op_type not in SUPPORTED | DYNAMIC:
            yield warning(
                node,
                f"{node.op_type} is not in the operator table of TensorRT's parser. Replace it by older operators, or "
                f"try to build",
            )


def check_dynamic_quantization(graph: LintGraph) -> Iterator[Problem]:
    """Find operators of dynamic quantization and of the QOperator format, which the parser refuses."""
    for node in standard_nodes(graph):
        if node.op_type in DYNAMIC:
            yield error(
                node,
                f"TensorRT's parser has no {node.op_type}: it takes INT8 as QuantizeLinear and DequantizeLinear with "
                f"constant scales. Quantize statically (quantize.static)",
            )


def check_limits(graph: LintGraph) -> Iterator[Problem]:
    """Find uses of known operators that the parser's table excludes for TensorRT 10.15; later versions may take
    them."""
    for node in standard_nodes(graph):
        needs, what = LIMITS.get(node.op_type, (None, ""))
        if needs is not None and needs(node):
            yield warning(node, f"TensorRT's parser does not take {what} of {node.op_type}. Export without")


def check_data_dependence(graph: LintGraph) -> Iterator[Problem]:
    """Find shapes that depend on data and control flow: they split the engine, and CUDA graphs cannot capture them."""
    for node in standard_nodes(graph):
        if node.op_type in DATA_DEPENDENT:
            yield warning(
                node,
                f"{node.op_type} makes shapes or the order of execution depend on data: TensorRT stops fusing around "
                f"it, and such an engine cannot be replayed as a CUDA graph. Replace it by a mask or by fixed shapes",
            )


def standard_nodes(graph: LintGraph) -> Iterator[NodeProto]:
    """Yield the nodes with standard operators, those of subgraphs included."""
    return (node for node in graph.all_nodes() if node.domain in DEFAULT_DOMAINS)
