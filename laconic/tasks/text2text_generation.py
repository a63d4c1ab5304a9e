"""Text-to-text generation: a text to the text that an encoder-decoder writes for it, as a translation or a summary."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

from tokenizers import Tokenizer

from laconic.arrays import Array, Arrays
from laconic.errors import CorruptArtifact
from laconic.tasks.assets import PREPROCESS, read_asset
from laconic.tasks.decoder_tensors import PAST, TARGET, TARGET_INPUTS
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.preprocessing import Preprocessing, TextOptions
from laconic.tasks.row_parsing import LABEL
from laconic.tasks.text import SingleText
from laconic.tasks.written_text import WrittenText, describe_target
from laconic.tensor import BATCH, TensorSpec


class TargetedText(str):
    """A text with what is to be written for it. target: the ids of its tokens, the end token included."""

    target: tuple[int, ...]

    def __new__(cls, text: str, target: Sequence[int]) -> "TargetedText":
        made = super().__new__(cls, text)
        made.target = tuple(target)
        return made

    def __getnewargs__(self) -> tuple[str, tuple[int, ...]]:  # type: ignore[override]
        return str(self), self.target


class Text2TextGeneration(WrittenText, SingleText):
    """A sample is a text."""

    name = "text2text-generation"
    columns: ClassVar[tuple[str, ...]] = (LABEL, TARGET)
    field_description = "A text, or a list of texts."
    auto_class = "AutoModelForSeq2SeqLM"
    architectures = ("ForConditionalGeneration", "MTModel")
    source_inputs = ("input_ids", "attention_mask")

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: tuple[TensorSpec, ...],
        *,
        generation: GenerationSettings,
        **options: Unpack[TextOptions],
    ) -> None:
        super().__init__(tokenizer, inputs, **options)
        self.settings = generation

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Return whether the model reads texts: encoder-decoders of images and sound have the same names."""
        return bool(config.get("is_encoder_decoder")) and not {"num_mel_bins", "vision_config"} & set(config)

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        generation = preprocessing.generation or GenerationSettings(decoder_start_token_id=preprocessing.start_id)
        target = describe_target(generation.max_new_tokens, preprocessing.cache_shape)
        inputs = (*cls.signature(preprocessing), *target)
        return cls(preprocessing.tokenizer, inputs, generation=generation, **preprocessing.text_options)

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        if [spec.name for spec in inputs] != [*cls.source_inputs, *TARGET_INPUTS]:
            raise CorruptArtifact(f"{folder} has other inputs than an encoder-decoder. Compress the model again")
        preprocess, generation = read_asset(folder, PREPROCESS), cls.read_generation(folder)
        return cls(cls.read_tokenizer(folder), inputs, **preprocess, generation=generation)

    def assets(self) -> dict[str, bytes]:
        return super().assets() | self.pack_generation()

    def limit_ids(self, count: int) -> None:
        super().limit_ids(count)
        self.check_generation(count)

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read the text of a row with its target, in the column of that name or of a label."""
        (text,), label = super().read_row(values, folder)
        target = values.get(TARGET, label)
        if target is None or not isinstance(text, str):
            return (text,), target
        return (TargetedText(text, self.encode_text(target)),), target

    def parse_label(self, value: Any, sample: Any) -> Any:
        """Return the ids of the target's tokens."""
        return list(self.encode_text(value))

    def has_target(self, sample: Any) -> bool:
        return isinstance(sample, TargetedText)

    def with_answers(self, samples: Sequence[Any], written: Array) -> list[Any]:
        return [TargetedText(text, self.cut(ids)) for text, ids in zip(samples, written.tolist(), strict=True)]

    def encode(self, samples: Sequence[Any]) -> Arrays:
        """Encode source and target; a sample without a target has the start token alone."""
        return super().encode(samples) | self.encode_targets([getattr(each, "target", ()) for each in samples])

    def check_values(self, inputs: Arrays) -> None:
        super().check_values(self.select_source(inputs))

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        return super().typical(batch, length, seed) | self.draw_target(batch, length, 0, seed)

    def sample_inputs(self, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
        rows = sizes.get(BATCH, 1)
        source = super().typical(rows, sizes.get("seq", 1), seed)
        return source | self.draw_target(rows, sizes.get(TARGET, 1), sizes.get(PAST, 0), seed)
