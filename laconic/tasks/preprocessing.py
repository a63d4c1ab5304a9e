"""What a checkpoint says about the preparation of its inputs, from which a task is made."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from laconic.tasks.chat_template import ChatTemplate

if TYPE_CHECKING:  # most servers read no audio and no images, and the libraries take memory
    from laconic.tasks.audio_preprocess import AudioPreprocess, LogMelPreprocess
    from laconic.tasks.ctc_vocabulary import CtcVocabulary
    from laconic.tasks.decoder_tensors import CacheShape
    from laconic.tasks.detections import Scoring
    from laconic.tasks.generation_settings import GenerationSettings
    from laconic.tasks.image_frames import ImageFrames
    from laconic.tasks.image_preprocess import ImagePreprocess

Activation = Literal["identity", "sigmoid"]


def make_blank_tokenizer() -> Tokenizer:
    """Make a tokenizer of a single word, for a task that only needs the shapes of its inputs."""
    return Tokenizer(WordLevel({"": 0}, unk_token=""))


class TextOptions(TypedDict):
    """How a text task reads texts. max_tokens: the longest one, special tokens included. pad_id: the padding token.
    labels: the names of the classes."""

    max_tokens: int
    pad_id: int
    labels: NotRequired[tuple[str, ...]]


@dataclass(frozen=True)
class Preprocessing:
    """Tokenizer or image settings, and the classes of a checkpoint.

    max_tokens: the longest text, special tokens included. pad_id: the token that pads shorter texts. start_id: the
    token that stands for an empty text. end_id: the token that ends a text; None without one. chat: the template of
    chats; None without one. token_types: whether the model takes `token_type_ids`. image: None where it is unknown.
    audio: None for a model that reads no waveforms. log_mel: None for one that reads no spectrograms. masks_audio:
    whether a mask tells recordings from their padding. characters: what speech is written with, character by character;
    None for a model that does not. labels: names of the classes. activation: what turns a single output into a score.
    mask_id: the token that stands for a masked one; None where the tokenizer has none. fixed_length: whether all texts
    are padded to `max_tokens`, and no mask tells the padding. generation: how a model writes; None for one that writes
    nothing. cache_shape: of its decoder's self-attention, twice the layers, the heads, and the width of a head.
    scoring: how a detector's outputs become objects. frames, image_id: of a model that reads texts with images, how
    these become frames, and the token that stands for one. The defaults serve for reading samples, or for planning,
    before a model is opened.
    """

    tokenizer: Tokenizer = field(default_factory=make_blank_tokenizer)
    max_tokens: int = 2**20
    pad_id: int = 0
    start_id: int = 0
    end_id: int | None = None
    chat: ChatTemplate | None = None
    token_types: bool = False
    image: "ImagePreprocess | None" = None
    audio: "AudioPreprocess | None" = None
    log_mel: "LogMelPreprocess | None" = None
    masks_audio: bool = False
    characters: "CtcVocabulary | None" = None
    labels: tuple[str, ...] = ()
    activation: Activation = "identity"
    mask_id: int | None = 0
    fixed_length: bool = False
    generation: "GenerationSettings | None" = None
    cache_shape: "CacheShape" = (2, 1, 1)
    scoring: "Scoring | None" = None
    frames: "ImageFrames | None" = None
    image_id: int = -1

    @property
    def text_options(self) -> TextOptions:
        """What every text task is made with, beside its tokenizer and inputs."""
        return {"max_tokens": self.max_tokens, "pad_id": self.pad_id}
