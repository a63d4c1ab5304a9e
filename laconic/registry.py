"""The registry: tables from the names used in recipes and on the command line to "package.module:object" addresses.

Nothing is imported before it is resolved. A new stage, task, runtime or target is one file and one line here. In a
recipe that is trusted, an address "their.package:Thing" works in place of the names of ADDRESSABLE kinds, and needs no
line. Nothing else that is read can name code.
"""

import pkgutil
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from laconic.errors import MissingPackage, UntrustedCode, UsageError, did_you_mean

PACKAGES = ("laconic", "train", "compress", "export", "serve")
"""The top-level packages that are installed together."""

TASKS = {
    "text-embedding": "laconic.tasks.text_embedding:TextEmbedding",
    "text-classification": "laconic.tasks.text_classification:TextClassification",
    "multi-label-classification": "laconic.tasks.multi_label_classification:MultiLabelClassification",
    "fill-mask": "laconic.tasks.fill_mask:FillMask",
    "question-answering": "laconic.tasks.question_answering:QuestionAnswering",
    "token-classification": "laconic.tasks.token_classification:TokenClassification",
    "text-ranking": "laconic.tasks.text_ranking:TextRanking",
    "text-regression": "laconic.tasks.text_regression:TextRegression",
    "text2text-generation": "laconic.tasks.text2text_generation:Text2TextGeneration",
    "image-embedding": "laconic.tasks.image_embedding:ImageEmbedding",
    "image-classification": "laconic.tasks.image_classification:ImageClassification",
    "object-detection": "laconic.tasks.object_detection:ObjectDetection",
    "semantic-segmentation": "laconic.tasks.semantic_segmentation:SemanticSegmentation",
    "audio-classification": "laconic.tasks.audio_classification:AudioClassification",
    "automatic-speech-recognition": "laconic.tasks.speech_recognition:SpeechRecognition",
    "speech-to-text": "laconic.tasks.speech_to_text:SpeechToText",
    "tensors": "laconic.tasks.tensors:Tensors",
    "image-text-to-text": "laconic.tasks.image_text_to_text:ImageTextToText",
    "text-generation": "laconic.tasks.text_generation:TextGeneration",
}

OBJECTIVES = {
    "answer-span": "train.objectives.answer_span:AnswerSpan",
    "binary-cross-entropy": "train.objectives.array_targets:BinaryCrossEntropy",
    "box-matching": "train.objectives.box_matching:BoxMatching",
    "ctc": "train.objectives.ctc_loss:CtcLoss",
    "cross-entropy": "train.objectives.cross_entropy:CrossEntropy",
    "next-token": "train.objectives.next_token:NextToken",
    "pixel-cross-entropy": "train.objectives.cross_entropy:PixelCrossEntropy",
    "target-tokens": "train.objectives.target_tokens:TargetTokens",
    "targets": "train.objectives.array_targets:Targets",
    "token-cross-entropy": "train.objectives.cross_entropy:TokenCrossEntropy",
    "text-embedding": "train.objectives.text_embeddings:TextEmbeddingObjective",
}
"""Training objectives, which tasks name; `of(task, dataset)` makes one."""

PREFERENCE_LOSSES = {
    "dpo": "train.objectives.preference_losses:Dpo",
    "orpo": "train.objectives.preference_losses:Orpo",
}
"""What a recipe of fine-tuning may name as its objective, for rows with a preferred answer."""

RUNTIMES = {
    "openvino": "laconic.runtimes.openvino:OpenVino",
    "onnxruntime": "laconic.runtimes.onnxruntime:OnnxRuntime",
    "onnxruntime-cuda": "laconic.runtimes.onnxruntime_cuda:OnnxRuntimeCuda",
    "tensorrt": "laconic.runtimes.tensorrt:TensorRt",
    "llamacpp": "laconic.runtimes.llamacpp:LlamaCpp",
    "fake": "laconic.runtimes.fake:Fake",
}

GENERATORS = {
    "llamacpp": "laconic.runtimes.llamacpp_generator:LlamaCppGenerator",
    "openvino": "laconic.runtimes.openvino_generator:OpenVinoGenerator",
    "openvino-decoder": "laconic.runtimes.openvino_decoder:OpenVinoDecoder",
    "openvino-genai": "laconic.runtimes.openvino_genai:OpenVinoGenAi",
}
"""Engines that write."""

STAGES = {
    "distill.embedding": "compress.distill.embeddings:EmbeddingDistillation",
    "distill.features": "compress.distill.features:FeatureDistillation",
    "distill.heal": "compress.distill.heal:Heal",
    "distill.layerwise": "compress.distill.layer_distillation:LayerwiseDistillation",
    "distill.logits": "compress.distill.logits:LogitDistillation",
    "distill.relations": "compress.distill.relations:RelationDistillation",
    "distill.student": "compress.distill.student:Student",
    "finetune": "compress.finetune_stage:Finetune",
    "prune.ffn": "compress.prune.unit_pruning:Ffn",
    "prune.heads": "compress.prune.unit_pruning:Heads",
    "prune.layers": "compress.prune.layers:Layers",
    "prune.two-four": "compress.prune.two_four:TwoFour",
    "prune.unstructured": "compress.prune.unstructured:Unstructured",
    "prune.channels": "compress.prune.channels:Channels",
    "factorize.low-rank": "compress.factorize.low_rank:LowRank",
    "factorize.convolution": "compress.factorize.convolution:Convolution",
    "quantize.static": "compress.quantize.static:Static",
    "quantize.awq": "compress.quantize.awq:Awq",
    "quantize.dynamic": "compress.quantize.dynamic:Dynamic",
    "quantize.gptq": "compress.quantize.weight_only:Gptq",
    "quantize.qat": "compress.quantize.qat:Qat",
    "quantize.weights": "compress.quantize.weight_only:Weights",
}

TECHNIQUES = {
    "activation-offload": "train.memory.activation_offload:ActivationOffload",
    "allocator": "train.memory.allocator:Allocator",
    "bf16": "train.memory.mixed_precision:Bf16",
    "chunked-cross-entropy": "train.memory.chunked_cross_entropy:ChunkedCrossEntropy",
    "compile": "train.memory.compile:Compile",
    "fp16": "train.memory.mixed_precision:Fp16",
    "gradient-accumulation": "train.memory.gradient_accumulation:GradientAccumulation",
    "gradient-checkpointing": "train.memory.gradient_checkpointing:GradientCheckpointing",
    "host-weights": "train.memory.host_weights:HostWeights",
    "inplace-activations": "train.memory.inplace_activations:InplaceActivations",
    "layerwise": "train.memory.layerwise:Layerwise",
    "lora": "train.memory.lora:Lora",
    "optimizer-in-backward": "train.memory.optimizer_in_backward:OptimizerInBackward",
    "pure-bf16": "train.memory.pure_bf16:PureBf16",
    "qlora": "train.memory.qlora:Qlora",
    "sdpa": "train.memory.sdpa:Sdpa",
    "sequence-packing": "train.memory.sequence_packing:SequencePacking",
}

CRITERIA = {
    "activation": "compress.criteria.activation:Activation",
    "fisher": "compress.criteria.fisher:Fisher",
    "magnitude": "compress.criteria.magnitude:Magnitude",
    "sparsegpt": "compress.criteria.sparsegpt:SparseGpt",
    "taylor": "compress.criteria.taylor:Taylor",
    "wanda": "compress.criteria.wanda:Wanda",
}
"""Importance criteria for pruning."""

PLACEMENTS = {
    "openvino": "export.placements.openvino_cpu:RULES",
    "llamacpp": "export.placements.llamacpp_cpu:RULES",
    "onnxruntime": "export.placements.onnxruntime_cpu:RULES",
    "onnxruntime-cuda": "export.placements.onnxruntime_gpu:RULES",
    "tensorrt": "export.placements.tensorrt_gpu:RULES",
}

ENGINE_FILES = {
    "llamacpp": "export.formats.llamacpp_file:write_llamacpp_file",
}
"""Engines that read a file of their own beside the graph, and what writes it."""

FORMATS = {
    ".jsonl": "laconic.data.json_lines:jsonl",
    ".csv": "laconic.data.formats:csv",
    ".tsv": "laconic.data.formats:csv",
    ".txt": "laconic.data.formats:txt",
    ".npz": "laconic.data.array_formats:npz",
    ".parquet": "laconic.data.parquet:ParquetRows",
    ".tar": "laconic.data.webdataset:TarRows",
    "folder": "laconic.data.formats:folder",
}

WEIGHT_FORMATS = {
    "awq": "laconic.weight_formats.awq_format:AwqFormat",
    "compressed-tensors": "laconic.weight_formats.compressed_tensors_format:CompressedTensorsFormat",
    "gptq": "laconic.weight_formats.gptq_format:GptqFormat",
}
"""By the `quant_method` of a config.json of transformers, how the quantized weights are stored."""

EXPORT_FORMATS = {
    "compressed-tensors": "export.formats.transformers_folder:write_compressed_tensors",
    "gguf": "export.formats.gguf_file:write_gguf",
    "gptq": "export.formats.transformers_folder:write_gptq",
    "openvino": "export.formats.openvino_folder:write_openvino",
}
"""Formats of other programs that artifacts of language models are written in."""

IMAGE_PROCESSORS = {
    "ConditionalDetrImageProcessor": "laconic.models.image_rules:read_detr",
    "ConvNextImageProcessor": "laconic.models.image_rules:read_convnext",
    "DeformableDetrImageProcessor": "laconic.models.image_rules:read_detr",
    "DetrImageProcessor": "laconic.models.image_rules:read_detr",
    "EfficientNetImageProcessor": "laconic.models.image_rules:read_efficientnet",
    "LevitImageProcessor": "laconic.models.image_rules:read_levit",
    "MobileViTImageProcessor": "laconic.models.image_rules:read_mobilevit",
    "PoolFormerImageProcessor": "laconic.models.image_rules:read_poolformer",
    "RTDetrImageProcessor": "laconic.models.image_rules:read_detr",
    "YolosImageProcessor": "laconic.models.image_rules:read_yolos",
}
"""By class of transformers, what makes an `ImagePreprocess` of its settings, where it has rules of its own."""

OPTIMIZERS = {
    "sgd": "train.optimizers.sgd:Sgd",
    "adamw": "train.optimizers.adamw:AdamW",
    "adamw-8bit": "train.optimizers.low_bit:AdamW8bit",
    "adamw-4bit": "train.optimizers.low_bit:AdamW4bit",
    "adafactor": "train.optimizers.adafactor:Adafactor",
    "lion": "train.optimizers.lion:Lion",
    "lamb": "train.optimizers.lamb:Lamb",
    "apollo": "train.optimizers.apollo:Apollo",
}

SCHEDULES = {
    "constant": "train.optimizers.schedule:Constant",
    "linear": "train.optimizers.schedule:Linear",
    "cosine": "train.optimizers.schedule:Cosine",
    "onecycle": "train.optimizers.schedule:OneCycle",
}

CALLBACKS = {
    "mlflow": "train.callbacks.mlflow_tracker:MlflowTracker",
    "wandb": "train.callbacks.wandb_tracker:WandbTracker",
}
"""Callbacks of fine-tuning."""

METRICS = {
    "accuracy": "train.finetune.classification_metrics:Accuracy",
    "auc": "train.finetune.classification_metrics:Auc",
    "balanced-accuracy": "train.finetune.classification_metrics:BalancedAccuracy",
    "f1-macro": "train.finetune.classification_metrics:F1Macro",
    "f1-micro": "train.finetune.classification_metrics:F1Micro",
    "matthews": "train.finetune.classification_metrics:Matthews",
    "precision-macro": "train.finetune.classification_metrics:PrecisionMacro",
    "recall-macro": "train.finetune.classification_metrics:RecallMacro",
    "mae": "train.finetune.regression_metrics:Mae",
    "mse": "train.finetune.regression_metrics:Mse",
    "pearson": "train.finetune.regression_metrics:Pearson",
    "r2": "train.finetune.regression_metrics:R2",
    "spearman": "train.finetune.regression_metrics:Spearman",
}
"""Metrics of the evaluations of fine-tuning."""

TARGETS: dict[str, tuple[str, ...]] = {
    "cpu": ("openvino", "onnxruntime"),
    "cuda": ("onnxruntime-cuda",),
    "tensorrt": ("tensorrt", "onnxruntime-cuda"),
}
"""The engines of each target, in order of preference."""

NAMED_ENGINES: dict[str, tuple[str, ...]] = {"cpu": ("llamacpp",)}
"""Engines of a target that compute less exactly than others: a recipe gets them where it names them."""


def list_engines(target: str) -> tuple[str, ...]:
    """List the engines that a recipe can name for a target."""
    return (*TARGETS[target], *NAMED_ENGINES.get(target, ()))


TABLES = {
    "task": TASKS,
    "objective": OBJECTIVES,
    "preference loss": PREFERENCE_LOSSES,
    "runtime": RUNTIMES,
    "generator": GENERATORS,
    "stage": STAGES,
    "placement": PLACEMENTS,
    "engine file": ENGINE_FILES,
    "criterion": CRITERIA,
    "technique": TECHNIQUES,
    "format": FORMATS,
    "weight format": WEIGHT_FORMATS,
    "export format": EXPORT_FORMATS,
    "image processor": IMAGE_PROCESSORS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "metric": METRICS,
    "callback": CALLBACKS,
}

ADDRESSABLE = ("stage", "criterion", "technique", "optimizer", "schedule", "metric", "callback")
"""The kinds for which a trusted recipe may give an address in place of a name."""

_addresses_are_trusted: ContextVar[bool] = ContextVar("addresses_are_trusted", default=False)

RENAMED: dict[str, dict[str, str]] = {
    "task": {"causal-lm": "text-generation"},
    "technique": {
        "accumulate": "gradient-accumulation",
        "checkpoint": "gradient-checkpointing",
        "chunked-loss": "chunked-cross-entropy",
        "in-backward": "optimizer-in-backward",
        "in-place": "inplace-activations",
        "offload": "activation-offload",
        "packing": "sequence-packing",
    },
}
"""By kind, names of earlier versions and today's: an old name is refused with the new one."""


PACKAGES_OF_EXTRA = {
    "compress": (
        "torch",
        "transformers",
        "optuna",
        "torch_pruning",
        "gguf",
        "onnx",
        "onnxscript",
        "onnx_ir",
        "ml_dtypes",
        "pyarrow",
        "matplotlib",
        "jinja2",
    ),
    "ray": ("ray", "aiohttp_cors", "grpc_reflection", "opencensus", "watchfiles"),
    "timm": ("timm",),
    "train": ("torchao", "peft", "accelerate", "tensorboard", "pynvml"),
    "deepspeed": ("deepspeed",),
    "dali": ("nvidia",),
    "cpu": ("onnxruntime", "openvino"),
    "generate": ("openvino_genai", "openvino_tokenizers", "llguidance"),
    "llamacpp": ("xllamacpp",),
    "tensorrt": ("tensorrt",),
    "gpu": ("cuda",),
    "serve": ("fastapi", "uvicorn", "orjson", "prometheus_client", "tokenizers", "PIL"),
    "otel": ("opentelemetry",),
    "remote": ("fsspec", "aiohttp"),
    "sign": ("cryptography",),
    "size": ("simpy",),
}
"""The packages that each extra of Laconic installs, by their import names."""

EXTRAS = {package: extra for extra, packages in PACKAGES_OF_EXTRA.items() for package in packages}
"""The extra of Laconic that installs a package, by the package's import name."""


def describe_unknown(kind: str, name: str) -> str:
    """Return a sentence on a name that no table has: its new name where it was renamed, else the nearest one."""
    if name in RENAMED.get(kind, {}):
        return f"{kind} {name!r} is now called {RENAMED[kind][name]!r}"
    return f"unknown {kind} {name!r}. {did_you_mean(name, TABLES[kind])}"


@contextmanager
def trust_addresses(trust: bool) -> Iterator[None]:
    """Allow addresses of code in place of registered names in the body, or forbid them, as they are by default. trust:
    what the user said of the file that holds the names (--trust)."""
    token = _addresses_are_trusted.set(trust)
    try:
        yield
    finally:
        _addresses_are_trusted.reset(token)


def resolve(kind: str, name: str) -> Any:
    """Import the object registered under `name`, or the one at the address "package.module:object" where
    `trust_addresses` allows it.

    Raises UsageError for an unknown name or an address that does not exist, UntrustedCode for an address that is not
    allowed, MissingPackage for a package to install.
    """
    table = TABLES[kind]
    if name in table:
        return import_address(table[name])
    if ":" not in name or kind not in ADDRESSABLE:
        raise UsageError(describe_unknown(kind, name))
    if not _addresses_are_trusted.get():
        raise UntrustedCode(
            f"{kind} {name!r} is an address of code, which would be imported and executed. Read that code first, then "
            f"give --trust"
        )
    return import_address(name)


def import_address(address: str) -> Any:
    """Import the object at "package.module:object".

    For addresses that users write: entries of the registry, and the factory of a module of their own. Raises UsageError
    for an address that does not exist, MissingPackage for a package that the module needs; whatever else importing the
    module raises is passed on.
    """
    if not all(part.isidentifier() for part in re.split("[.:]", address)):
        raise UsageError(f"{address!r} is not an address of the form 'package.module:object'")
    module_name, _, attribute = address.partition(":")
    try:
        return pkgutil.resolve_name(address)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            if error.name.partition(".")[0] in PACKAGES:
                raise  # a fault of Laconic's own, not a package to install
            raise missing_package(error.name) from error
        raise UsageError(f"there is no module {module_name!r} (from {address!r})") from error
    except AttributeError as error:
        if error.name not in attribute.split("."):
            raise  # from the module's own code
        raise UsageError(f"module {module_name!r} has no {attribute!r} (from {address!r})") from None


def missing_package(package: str) -> MissingPackage:
    """Make the error for a package that is not installed, with the command that installs it."""
    extra = EXTRAS.get(package.partition(".")[0])
    command = f"pip install 'laconic[{extra}]'" if extra else f"pip install {package}"
    return MissingPackage(f"package {package!r} is required and not installed. Try: {command}")
