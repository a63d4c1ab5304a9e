"""NumPy arrays of any type and shape, alone and by the name of their tensor."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = dict[str, Array]
