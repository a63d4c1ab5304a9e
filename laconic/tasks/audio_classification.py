"""Audio classification: a recording to one of several classes, as its language, speaker, emotion or command."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from laconic.tasks.audio import AudioTask
from laconic.tasks.audio_preprocess import AudioPreprocess
from laconic.tasks.checkpoint_loading import reads_waveforms
from laconic.tasks.classes import label_assets, read_labels
from laconic.tasks.classification import Classification
from laconic.tasks.preprocessing import Preprocessing
from laconic.tensor import TensorSpec


class AudioClassification(Classification, AudioTask):
    """A recording to one of several classes."""

    name = "audio-classification"
    has_class_head = True
    auto_class = "AutoModelForAudioClassification"
    architectures = ("ForSequenceClassification",)

    def __init__(
        self, inputs: tuple[TensorSpec, ...], *, preprocess: AudioPreprocess, labels: tuple[str, ...] = ()
    ) -> None:
        super().__init__(inputs, preprocess=preprocess)
        self.labels = labels

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        return reads_waveforms(config) and super().fits(config)

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        return super().from_preprocessing(preprocessing).with_labels(preprocessing.labels)

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        return super().from_assets(folder, inputs).with_labels(read_labels(folder))

    def assets(self) -> dict[str, bytes]:
        return super().assets() | label_assets(self.labels)
