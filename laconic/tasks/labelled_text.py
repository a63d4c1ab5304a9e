"""Texts to classes: what all tasks share whose samples are texts and whose model has an output for each class."""

from collections.abc import Mapping
from typing import Any

from laconic.tasks.checkpoint_loading import reads_waveforms
from laconic.tasks.classes import LabelledTask
from laconic.tasks.text import TextTask


class LabelledText(LabelledTask, TextTask):
    """A text task whose classes have names, which the artifact holds."""

    has_class_head = True

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        return not reads_waveforms(config) and cls.fits(config)
