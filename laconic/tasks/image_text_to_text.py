"""Image and text to text: a chat with an image to the answer that a vision-language model writes."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Self, Unpack

import numpy as np
from PIL import Image as Pillow
from tokenizers import Tokenizer

from laconic.arrays import Array, Arrays
from laconic.errors import CorruptArtifact, InputError, SourceError
from laconic.metrics import cosine
from laconic.tasks.agreement import Agreement
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.assets import PREPROCESS, read_asset, to_json
from laconic.tasks.causal_text import CHAT, MESSAGES
from laconic.tasks.chat_template import ChatTemplate
from laconic.tasks.decoder_tensors import IMAGE_FEATURES, PIXELS, TEXT_INPUTS, CacheShape
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.image_preprocess import ImagePreprocess, open_image
from laconic.tasks.image_text import ImageText, expand_image, render_image_chat
from laconic.tasks.null_answers import NULL, shuffle_rows
from laconic.tasks.preprocessing import Preprocessing, TextOptions
from laconic.tasks.text import WORDS
from laconic.tasks.text_generation import SERVED, TextGeneration, describe_inputs, find_last_answer
from laconic.tensor import BATCH, TensorSpec

IMAGE = "image"
"""The column of an image, and its key in a sample."""
FEATURES_LEAST = 0.9
"""The least mean cosine of an image's features with the original's, both less those of the mean image."""


class ImageTextToText(TextGeneration):
    """A sample is a chat with one image, or none.

    It is compared as a text is. Beside it, the features that the tower makes of the images must stay like the
    original's; and what the original writes for another sample's image is a null answer, so that no model passes that
    ignores the image.
    """

    name = "image-text-to-text"
    field = "chat"
    field_description = "An object with `messages`, as OpenAI describes them, and an `image`, a file in base64."
    columns: ClassVar[tuple[str, ...]] = (MESSAGES, IMAGE)
    accepts = frozenset()
    auto_class = "AutoModelForImageTextToText"
    architectures: ClassVar[tuple[str, ...]] = ("LlavaForConditionalGeneration",)
    default_recipe = "image-text-to-text"
    learns_preferences = False
    is_trainable = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: tuple[TensorSpec, ...],
        *,
        preprocess: ImagePreprocess,
        image_id: int,
        patches: int,
        generation: GenerationSettings,
        start_id: int,
        end_id: int | None = None,
        chat: ChatTemplate | None = None,
        **options: Unpack[TextOptions],
    ) -> None:
        """image_id: the token that stands for an image. patches: of an image, each of which takes the place of a
        token."""
        super().__init__(
            tokenizer, inputs, generation=generation, start_id=start_id, end_id=end_id, chat=chat, **options
        )
        self.preprocess, self.image_id, self.patches = preprocess, image_id, patches

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        inputs = describe_inputs(preprocessing.max_tokens, preprocessing.cache_shape)
        options = cls.select_options(preprocessing)
        return cls(preprocessing.tokenizer, add_pixels(inputs, options["preprocess"]), **options)

    @classmethod
    def select_options(cls, preprocessing: Preprocessing) -> dict[str, Any]:
        image = preprocessing.image or ImagePreprocess(resize=(1, 1))
        places = {"image_id": preprocessing.image_id, "patches": preprocessing.patches}
        return super().select_options(preprocessing) | {"preprocess": image} | places

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        preprocess = read_asset(folder, PREPROCESS)
        image = ImagePreprocess.model_validate(preprocess.pop("preprocess"))
        if tuple(spec.name for spec in inputs) not in ((*TEXT_INPUTS, PIXELS), (*SERVED, PIXELS)):
            raise CorruptArtifact(f"{folder} has other inputs than a vision-language model. Compress the model again")
        chat = ChatTemplate(**read_asset(folder, CHAT)) if (folder / CHAT).is_file() else None
        generation = cls.read_generation(folder)
        return cls(cls.read_tokenizer(folder), inputs, **preprocess, preprocess=image, generation=generation, chat=chat)

    def assets(self) -> dict[str, bytes]:
        text = {"max_tokens": self.max_tokens, "pad_id": self.pad_id, "start_id": self.start_id, "end_id": self.end_id}
        image = {"preprocess": self.preprocess.model_dump(mode="json"), "image_id": self.image_id}
        return super().assets() | {PREPROCESS: to_json({**text, **image, "patches": self.patches})}

    def with_cache(self, shape: CacheShape | None) -> Self:
        if shape is None:
            raise SourceError(
                "a model that reads images needs a cache of keys and values of one form, and an engine of the CPU that "
                "writes. Choose --target cpu, or another model"
            )
        task = super().with_cache(shape)
        task.inputs = add_pixels(task.inputs, self.preprocess)
        return task

    def served_inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.name in (*SERVED, PIXELS))

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read a chat with its image: the content of a file, or a path relative to `folder`."""
        chat = values.get(self.field, values)
        image = chat.get(IMAGE) if isinstance(chat, Mapping) else None
        if isinstance(image, Mapping):  # how Parquet files of Hugging Face hold files
            image = image.get("bytes")
        elif isinstance(image, str):
            path = folder / image
            if not path.is_file():
                raise InputError(f"there is no image {image!r} (looked for {path})")
            image = path
        return (self.read_chat(chat, image),), None

    def read_chat(self, value: Any, image: Any) -> ImageText:
        """Read a chat, and render it. value: an object with its messages. Raises InputError."""
        if isinstance(value, ImageText):
            return value
        if self.chat is None:
            raise InputError("the model has no chat template, so a chat cannot be made a text")
        messages = value.get(MESSAGES) if isinstance(value, Mapping) else None
        if not isinstance(messages, list):
            raise InputError(f"expected a list of objects {{'role': ..., 'content': ...}} under {MESSAGES!r}")
        if not isinstance(image, (bytes, Path, np.ndarray, NoneType)):
            raise InputError(f"an image must be the content of a file, not {type(image).__name__}")
        return render_image_chat(self.chat, messages, image)

    def parse(self, value: Any) -> Any:
        """Take a chat as JSON, its image in base64; or one that was read before."""
        image = value.get(IMAGE) if isinstance(value, Mapping) else None
        if isinstance(image, str):
            try:
                image = base64.b64decode(image.partition("base64,")[2] or image, validate=True)
            except ValueError:  # binascii.Error is one, and so is what other than ASCII raises
                raise InputError("an image in JSON must be the file's bytes in base64") from None
        sample = self.read_chat(value, image)
        self.read_pixels(sample)
        (encoding,) = self.encode_texts([sample])
        if encoding.overflowing or len(encoding.ids) > self.max_tokens:
            raise InputError(
                f"the chat has more than {self.max_tokens} tokens with the {self.patches} of its image, and the model "
                f"takes no more. Send a shorter chat"
            )
        return sample

    def encode_prompt(self, text: str, image: bytes | None) -> Arrays:
        """Encode a rendered chat with its image, for an engine that writes: `input_ids` [1, seq] and `pixel_values`
        [1, ...]. Raises InputError."""
        encoded = self.encode_request(ImageText(text, image=image))
        return {name: encoded[name] for name in ("input_ids", PIXELS)}

    def read_pixels(self, sample: Any) -> Array:
        """Read the image of a sample, [channels, height, width] float32; zeros where it has none. Raises
        InputError."""
        image = getattr(sample, "image", None)
        spec = self.inputs[-1]
        if image is None:
            return np.zeros([int(axis) for axis in spec.shape[1:]], np.float32)
        if not isinstance(image, np.ndarray):
            return self.preprocess.apply(open_image(image))
        spec.check(image[None], {})
        return image

    def encode_texts(self, samples: Sequence[Any]) -> list[Any]:
        """Return the tokens of each sample, its image's patches among them. A tokenizer's special tokens are added
        where the template writes none at the beginning, as transformers does."""
        start = self.chat.tokens.get("bos_token") if self.chat else None
        encodings = []
        for sample in samples:
            is_begun = start is not None and sample.startswith(start)
            encoding = self.tokenizer.encode(str(sample), add_special_tokens=not is_begun)
            images = int(getattr(sample, "image", None) is not None)
            encodings.append(expand_image(encoding, self.image_id, self.patches, images))
        return encodings

    def encode(self, samples: Sequence[Any]) -> Arrays:
        return self.order(super().encode(samples) | self.stack_pixels(samples))

    def encode_request(self, sample: Any) -> Arrays:
        return super().encode_request(sample) | self.stack_pixels([sample])

    def stack_pixels(self, samples: Sequence[Any]) -> Arrays:
        """Return the images of samples, [samples, channels, height, width]."""
        return {PIXELS: np.stack([self.read_pixels(sample) for sample in samples])}

    def order(self, arrays: Arrays) -> Arrays:
        """Return inputs in the model's order."""
        return {spec.name: arrays[spec.name] for spec in self.inputs if spec.name in arrays}

    def has_target(self, sample: Any) -> bool:
        return bool(sample.answers or sample.written)

    def with_answers(self, samples: Sequence[Any], written: Array) -> list[Any]:
        return [
            ImageText(sample, sample.answers, sample.image, () if sample.answers else self._cut_known(ids))
            for sample, ids in zip(samples, written.tolist(), strict=True)
        ]

    def _divide(self, sample: Any, ids: Array, learned: Array) -> tuple[list[int], list[int]]:
        """Divide a chat, of which nothing is cut: an image would be."""
        if not sample.answers:
            room = max(1, self.max_tokens - len(ids) + 1)  # the last token of a target is not read
            return ids.tolist(), list(sample.written[: min(self.compared, room)])
        start, stop = find_last_answer(learned)
        return ids[:start].tolist(), ids[start : min(stop, start + self.compared)].tolist()

    def make_null_samples(self, samples: Sequence[Any]) -> Sequence[Any] | None:
        """Return samples with the image of another one each, far from it: rows beside it may have the same one."""
        images = [sample.image for sample in samples if sample.image is not None]
        others = iter([*images[len(images) // 2 :], *images[: len(images) // 2]])
        return [
            sample if sample.image is None else ImageText(sample, sample.answers, next(others), sample.written)
            for sample in samples
        ]

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        """Return those to texts, and what the original answers for another image."""
        other = {name.removeprefix(NULL): array for name, array in reference.items() if name.startswith(NULL)}
        own = {name: array for name, array in reference.items() if not name.startswith(NULL)}
        features = own.pop(IMAGE_FEATURES)
        lost = shuffle_rows({IMAGE_FEATURES: features})
        nulls = {name: answer | lost for name, answer in super().null_answers(own).items()}
        return nulls | ({"another image": {name: other[name] for name in (*own, IMAGE_FEATURES)}} if other else {})

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        """Compare what is written, and the features of the images."""
        yield from super().agreements(reference, candidate, labels)
        ours, theirs = (each[IMAGE_FEATURES].reshape(len(each[IMAGE_FEATURES]), -1) for each in (reference, candidate))
        centre = ours.mean(axis=0)
        if len(ours) > 1:
            likeness = float(cosine(ours - centre, theirs - centre).mean())
            yield Agreement("image_features_cosine", likeness, FEATURES_LEAST)

    def label_samples(self, samples: Sequence[Any], labels: Labels) -> Labels:
        places = super().label_samples(samples, labels) or []
        marked = [each if sample.answers else range(0) for each, sample in zip(places, samples, strict=False)]
        return marked if any(marked) else None

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        return self.sample_inputs({BATCH: batch, "seq": length}, seed)

    def sample_inputs(self, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
        """Draw texts with patches of an image at every other place."""
        drawn = super().sample_inputs(sizes, seed)
        rng = np.random.default_rng(seed)
        ids = drawn["input_ids"]
        ids[:, ::2] = -1 - rng.integers(0, self.patches, ids[:, ::2].shape)
        return self.order(drawn | {PIXELS: self.inputs[-1].sample(rng, {BATCH: len(ids)})})

    def timed(self, batch: int, length: int) -> Arrays:
        """Make prompts that begin with an image."""
        timed = super().timed(batch, max(length, self.patches + 1))
        ids, rng = np.maximum(timed["input_ids"], 0), np.random.default_rng(0)
        ids[ids == self.image_id] = (self.image_id + 1) % self.vocabulary
        ids[:, : self.patches] = -1 - np.arange(self.patches)
        return timed | {"input_ids": ids, PIXELS: self.inputs[-1].sample(rng, {BATCH: batch})}

    def check_values(self, inputs: Arrays) -> None:
        ids = inputs.get("input_ids")
        if ids is not None and ids.size and ids.min() < -self.patches:
            raise InputError(f"the tokens begin with {ids.min()}, and an image has the patches -1 to {-self.patches}")
        texts = {name: np.maximum(array, 0) if name == "input_ids" else array for name, array in inputs.items()}
        super().check_values(texts)

    def fragments(self, samples: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
        """Return none: an image has no parts that a model was trained with."""
        return []

    def count_cut(self, samples: Sequence[Any]) -> int:
        return 0

    def sample_schema(self) -> dict[str, Any]:
        file = {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/*"}
        properties = {MESSAGES: {"type": "array", "items": {"type": "object"}}, IMAGE: file}
        return {"type": "object", "properties": properties, "required": [MESSAGES]}

    def example_request(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": "What is this?"}]
        image = base64.b64encode(write_png(Pillow.new("RGB", (16, 16), "teal"))).decode()
        return {self.field: {MESSAGES: messages, IMAGE: image}}

    def examples(self, count: int, seed: int = 0) -> list[Any]:
        """Make chats about images of noise; without a template, texts without an image."""
        rng = np.random.default_rng(seed)
        texts = [" ".join(rng.choice(WORDS, rng.integers(1, 8))) for _ in range(count)]
        if self.chat is None:
            return [ImageText(text) for text in texts]
        noises = [Pillow.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)) for _ in texts]
        chats = [[{"role": "user", "content": text}] for text in texts]
        return [
            self.parse({MESSAGES: chat, IMAGE: write_png(noise)}) for chat, noise in zip(chats, noises, strict=True)
        ]


def write_png(image: Pillow.Image) -> bytes:
    """Return the content of a PNG file of an image."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def add_pixels(inputs: tuple[TensorSpec, ...], image: ImagePreprocess) -> tuple[TensorSpec, ...]:
    """Return the inputs of a language model with that of an image behind them. Raises SourceError for images that are
    not of one size."""
    sides = image.crop or image.resize
    if sides is None or (image.crop is None and image.keep_ratio):
        raise SourceError(
            "the image processor leaves images their size, and vision-language models are supported whose images all "
            "have one"
        )
    return (*inputs, TensorSpec(name=PIXELS, dtype="float32", shape=(BATCH, image.channels, *sides)))
