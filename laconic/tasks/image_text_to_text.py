"""Images and text to text: a chat with images to the answer that a vision-language model writes."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
from laconic.tasks.decoder_tensors import FRAMES, IMAGE_FEATURES, IMAGE_INPUTS, PIXELS, TEXT_INPUTS, CacheShape
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.image_blocks import ImageBlocks
from laconic.tasks.image_files import IMAGE, IMAGES, decode_image, find_image, fit_image, list_images, write_png
from laconic.tasks.image_frames import ONE_FRAME, Grid, ImageFrames, check_frames
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.image_text import Image, ImageText, expand_images, render_image_chat
from laconic.tasks.null_answers import NULL, shuffle_rows
from laconic.tasks.preprocessing import Preprocessing, TextOptions
from laconic.tasks.text import WORDS
from laconic.tasks.text_generation import SERVED, TextGeneration, describe_inputs, find_last_answer
from laconic.tensor import BATCH, TensorSpec

FEATURES_LEAST = 0.9
"""The least mean cosine of an image's features with the original's, both less those of the mean image."""


class ImageTextToText(TextGeneration):
    """A sample is a chat with images, or with none.

    It is compared as a text is. Beside it, the features that the tower makes of each sample's first image must stay
    like the original's; and what the original writes for other samples' images is a null answer, so that no model
    passes that ignores the images.
    """

    name = "image-text-to-text"
    field = "chat"
    field_description = (
        "An object with `messages`, as OpenAI describes them, and an `image`, a file in base64, or `images`, a list."
    )
    columns: ClassVar[tuple[str, ...]] = (MESSAGES, IMAGE, IMAGES)
    accepts = frozenset()
    auto_class = "AutoModelForImageTextToText"
    architectures: ClassVar[tuple[str, ...]] = (
        "LlavaForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    )
    default_recipe = "image-text-to-text"
    learns_preferences = False
    is_trainable = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: tuple[TensorSpec, ...],
        *,
        frames: ImageFrames,
        image_id: int,
        generation: GenerationSettings,
        start_id: int,
        end_id: int | None = None,
        chat: ChatTemplate | None = None,
        **options: Unpack[TextOptions],
    ) -> None:
        """frames: how images are prepared. image_id: the token that stands for an image."""
        super().__init__(
            tokenizer, inputs, generation=generation, start_id=start_id, end_id=end_id, chat=chat, **options
        )
        self.frames, self.image_id = frames, image_id

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        inputs = describe_inputs(preprocessing.max_tokens, preprocessing.cache_shape)
        options = cls.select_options(preprocessing)
        return cls(preprocessing.tokenizer, (*inputs, *options["frames"].describe_inputs()), **options)

    @classmethod
    def select_options(cls, preprocessing: Preprocessing) -> dict[str, Any]:
        frames = preprocessing.frames or ImageFrames(frame=ImagePreprocess(resize=(1, 1)))
        return super().select_options(preprocessing) | {"frames": frames, "image_id": preprocessing.image_id}

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        preprocess = read_asset(folder, PREPROCESS)
        settings = preprocess.pop("frames")
        frames = (ImageBlocks if "side" in settings else ImageFrames).model_validate(settings)
        names, images = ([spec.name for spec in specs] for specs in (inputs, frames.describe_inputs()))
        has_frames = all(FRAMES in spec.shape for spec in inputs[-len(images) :])
        if names not in ([*TEXT_INPUTS, *images], [*SERVED, *images]) or not has_frames:
            raise CorruptArtifact(f"{folder} has other inputs than a vision-language model. Compress the model again")
        chat = ChatTemplate(**read_asset(folder, CHAT)) if (folder / CHAT).is_file() else None
        generation = cls.read_generation(folder)
        return cls(cls.read_tokenizer(folder), inputs, **preprocess, frames=frames, generation=generation, chat=chat)

    def assets(self) -> dict[str, bytes]:
        text = {"max_tokens": self.max_tokens, "pad_id": self.pad_id, "start_id": self.start_id, "end_id": self.end_id}
        images = {"frames": self.frames.model_dump(mode="json"), "image_id": self.image_id}
        return super().assets() | {PREPROCESS: to_json({**text, **images})}

    def with_cache(self, shape: CacheShape | None) -> Self:
        if shape is None:
            raise SourceError(
                "a model that reads images needs a cache of keys and values of one form, and an engine of the CPU that "
                "writes. Choose --target cpu, or another model"
            )
        task = super().with_cache(shape)
        task.inputs = (*task.inputs, *self.frames.describe_inputs())
        return task

    def served_inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.name in (*SERVED, *IMAGE_INPUTS))

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read a chat with its images: the contents of files, or paths relative to `folder`."""
        chat = values.get(self.field, values)
        return (self.read_chat(chat, [find_image(each, folder) for each in list_images(chat)]),), None

    def read_chat(self, value: Any, images: Sequence[Image]) -> ImageText:
        """Read a chat, and render it. value: an object with its messages. Raises InputError."""
        if isinstance(value, ImageText):
            return value
        if self.chat is None:
            raise InputError("the model has no chat template, so a chat cannot be made a text")
        messages = value.get(MESSAGES) if isinstance(value, Mapping) else None
        if not isinstance(messages, list):
            raise InputError(f"expected a list of objects {{'role': ..., 'content': ...}} under {MESSAGES!r}")
        return render_image_chat(self.chat, messages, images, self.measure(images))

    def measure(self, images: Sequence[Image]) -> list[Grid]:
        """Measure into how many tiles images are cut. Raises InputError for more images than the context has room
        for, before any is decoded."""
        if len(images) * self.frames.patches > self.max_tokens:
            raise InputError(
                f"the model's context is {self.max_tokens} tokens, and {len(images)} images have at least "
                f"{self.frames.patches} each. Send fewer images"
            )
        grids = [self.frames.measure(each) for each in images]
        check_frames(sum(map(self.frames.count, grids)))
        return grids

    def parse(self, value: Any) -> Any:
        """Take a chat as JSON, its images in base64; or one that was read before."""
        sample = self.read_chat(value, [decode_image(each) for each in list_images(value)])
        (encoding,) = self.encode_texts([sample])
        if encoding.overflowing or len(encoding.ids) > self.max_tokens:
            raise InputError(
                f"the chat has more than {self.max_tokens} tokens with the patches of its images, and the model takes "
                f"no more. Send a shorter chat, or fewer or smaller images"
            )
        self.frames.read(sample.images)
        return sample

    def encode_prompt(self, text: str, images: Sequence[bytes]) -> Arrays:
        """Encode a rendered chat with its images, for an engine that writes: `input_ids` [1, seq] and `pixel_values`
        [1, frames, ...]; the tokens alone where they leave no room for an answer. Raises InputError."""
        sample = ImageText(text, (), images, self.measure(images))
        ids = super().encode_request(sample)["input_ids"]
        return {"input_ids": ids} | (self.stack_images([sample], ids) if ids.shape[1] < self.max_tokens else {})

    def encode_texts(self, samples: Sequence[Any]) -> list[Any]:
        """Return the tokens of each sample, its images' patches among them. A tokenizer's special tokens are added
        where the template writes none at the beginning, as transformers does."""
        start = self.chat.tokens.get("bos_token") if self.chat else None
        encodings = []
        for sample in samples:
            is_begun = start is not None and sample.startswith(start)
            encoding = self.tokenizer.encode(str(sample), add_special_tokens=not is_begun)
            layouts = [self.lay_out(grid) for grid in getattr(sample, "grids", ())]
            encodings.append(expand_images(encoding, self.image_id, self.frames.patches, layouts))
        return encodings

    def lay_out(self, grid: Grid) -> list[int]:
        """Return the tokens of an image that is cut into these tiles, one of its own for each frame."""
        if grid == ONE_FRAME and not self.frames.around:
            return [self.image_id]
        text = self.frames.describe(grid, self.tokenizer.id_to_token(self.image_id) or "")
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, samples: Sequence[Any]) -> Arrays:
        encoded = super().encode(samples)
        return self.order(encoded | self.stack_images(samples, encoded["input_ids"]))

    def encode_request(self, sample: Any) -> Arrays:
        encoded = super().encode_request(sample)
        return encoded | self.stack_images([sample], encoded["input_ids"])

    def stack_images(self, samples: Sequence[Any], ids: Array) -> Arrays:
        """Return the images of samples as the model reads them. ids: the tokens of the samples."""
        rows = [self.frames.read(getattr(sample, IMAGES, ())) for sample in samples]
        return self.frames.stack(rows, list(ids), [getattr(sample, "grids", ()) for sample in samples])

    def order(self, arrays: Arrays) -> Arrays:
        """Return inputs in the model's order."""
        return {spec.name: arrays[spec.name] for spec in self.inputs if spec.name in arrays}

    def has_target(self, sample: Any) -> bool:
        return bool(sample.answers or sample.written)

    def with_answers(self, samples: Sequence[Any], written: Array) -> list[Any]:
        return [
            sample.with_written(() if sample.answers else self._cut_known(ids))
            for sample, ids in zip(samples, written.tolist(), strict=True)
        ]

    def _divide(self, sample: Any, ids: Array, learned: Array) -> tuple[list[int], list[int]]:
        """Divide a chat, of which nothing is cut: images would be."""
        if not sample.answers:
            room = max(1, self.max_tokens - len(ids) + 1)  # the last token of a target is not read
            return ids.tolist(), list(sample.written[: min(self.compared, room)])
        start, stop = find_last_answer(learned)
        return ids[:start].tolist(), ids[start : min(stop, start + self.compared)].tolist()

    def make_null_samples(self, samples: Sequence[Any]) -> Sequence[Any] | None:
        """Return samples with images of other ones, far from them: rows beside a sample may have the same one."""
        images = [image for sample in samples for image in sample.images]
        grids = [grid for sample in samples for grid in sample.grids]
        half = len(images) // 2
        pairs = zip(images, grids, [*images[half:], *images[:half]], [*grids[half:], *grids[:half]], strict=True)
        others = iter([other if grid == shape else fit_image(other, own) for own, grid, other, shape in pairs])
        return [sample.with_images([next(others) for _ in sample.images]) for sample in samples]

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
        """Draw texts with patches of images at every other place."""
        drawn = super().sample_inputs(sizes, seed)
        rng = np.random.default_rng(seed)
        ids, frames = drawn["input_ids"], sizes.get(FRAMES, 1)
        ids[:, ::2] = -1 - rng.integers(0, frames * self.frames.patches, ids[:, ::2].shape)
        sizes = {BATCH: len(ids), FRAMES: frames}
        return self.order(drawn | {spec.name: spec.sample(rng, sizes) for spec in self.frames.describe_inputs()})

    def timed(self, batch: int, length: int) -> Arrays:
        """Make prompts that begin with the smallest image."""
        grid = self.frames.smallest
        frames = self.frames.count(grid)
        patches = frames * self.frames.patches
        timed = super().timed(batch, max(length, patches + 1))
        ids, rng = np.maximum(timed["input_ids"], 0), np.random.default_rng(0)
        ids[ids == self.image_id] = (self.image_id + 1) % self.vocabulary
        ids[:, :patches] = -1 - np.arange(patches)
        rows = rng.standard_normal((batch, frames, *map(int, self.frames.shape[2:]))).astype(np.float32)
        return timed | {"input_ids": ids} | self.frames.stack(list(rows), list(ids), [[grid]] * batch)

    def check_values(self, inputs: Arrays) -> None:
        ids, pixels = inputs.get("input_ids"), inputs.get(PIXELS)
        if pixels is not None:
            check_frames(pixels.shape[1])
        patches = self.frames.patches * (1 if pixels is None else pixels.shape[1])
        if ids is not None and ids.size and ids.min() < -patches:
            raise InputError(f"the tokens begin with {ids.min()}, and the images have the patches -1 to {-patches}")
        texts = {name: np.maximum(array, 0) if name == "input_ids" else array for name, array in inputs.items()}
        super().check_values(texts)

    def fragments(self, samples: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
        """Return none: an image has no parts that a model was trained with."""
        return []

    def count_cut(self, samples: Sequence[Any]) -> int:
        return 0

    def sample_schema(self) -> dict[str, Any]:
        file = {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/*"}
        files = {"type": "array", "items": file}
        properties = {MESSAGES: {"type": "array", "items": {"type": "object"}}, IMAGE: file, IMAGES: files}
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
