"""Audio classification: a recording to one of several classes, as its language, speaker, emotion or command."""

from collections.abc import Mapping
from typing import Any

from laconic.tasks.audio import AudioTask
from laconic.tasks.checkpoint_loading import reads_waveforms
from laconic.tasks.classes import LabelledTask
from laconic.tasks.classification import Classification


class AudioClassification(Classification, LabelledTask, AudioTask):
    """A recording to one of several classes."""

    name = "audio-classification"
    has_class_head = True
    auto_class = "AutoModelForAudioClassification"
    architectures = ("ForSequenceClassification",)

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        return reads_waveforms(config) and super().fits(config)
