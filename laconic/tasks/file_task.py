"""Tasks whose samples come in files: images and recordings."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from laconic.arrays import Arrays, first
from laconic.errors import InputError
from laconic.tasks.task import Task


class FileTask(Task):
    """A task whose sample is the content of a file, or the array that is made from it."""

    decodes_files = True
    content: ClassVar[str]
    """What a file holds, as in "a recording"."""

    def read_base64(self, text: str) -> bytes:
        """Read the bytes of a file in base64, or in a data URL. Raises InputError."""
        try:
            return base64.b64decode(text.partition("base64,")[2] or text, validate=True)
        except ValueError:  # binascii.Error is one, and so is what other than ASCII raises
            raise InputError(f"{self.content} in JSON must be the file's bytes in base64") from None

    def read_field(self, value: Any, folder: Path) -> Any:
        """Read the path of a file, relative to `folder`; the bytes of one; or an array as it is."""
        if isinstance(value, Mapping) and value.get("bytes"):  # how Parquet files of Hugging Face hold files
            return bytes(value["bytes"])
        if isinstance(value, str):
            path = folder / value
            if not path.is_file():
                raise InputError(f"there is no {self.content.partition(' ')[2]} {value!r} (looked for {path})")
            return path
        return value

    def from_arrays(self, arrays: Arrays) -> Any:
        return first(arrays)

    def example_request(self) -> dict[str, Any]:
        return {self.field: "..."}
