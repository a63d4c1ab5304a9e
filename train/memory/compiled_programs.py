"""Where torch.compile keeps what it compiles: in Laconic's cache folder, apart for each set of instructions."""

import os

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from laconic.cache import Cache
from laconic.hardware import this_machine
from laconic.hashing import hash_of, read_arithmetic_variables

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_programs() -> None:
    """Have torch's compiler keep its programs there, unless the environment names a folder.

    By default it keeps them in the shared folder for temporary files, where others may write. It finds them by the
    graph, and not by the processor's instructions (torch 2.13): a program for AVX-512 that a process held to AVX2 found
    in a shared folder read beyond its arrays, and crashed or trained on wrong values.
    """
    if os.environ.get(VARIABLE) in (None, default_cache_dir()):  # the latter where torch has set it by itself
        instructions = hash_of(this_machine().features, read_arithmetic_variables())
        os.environ[VARIABLE] = str(Cache().folder / "torch-compile" / instructions)
