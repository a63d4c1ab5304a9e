"""llama.cpp's library, in the package xllamacpp: reading tokens of several texts at a time, which share one cache."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

from laconic.arrays import Array
from laconic.errors import RuntimeFailure

VERSION = "2026.10.11549"
"""The version whose structures are described here. It has llama.cpp's build 11549; others have other fields."""
BATCH = 512
"""The most tokens that are read at once."""
TEXTS = 64
"""The most texts in the cache, and the most logits of a batch."""
MOST_TOKENS = 1 << 24
"""The most tokens of a cache: its places are counted in 32 bits."""
DECODE = 1
"""llama.cpp's number for reading tokens behind those in the cache."""
DEFAULTS = {
    "llama_model_default_params": {"n_gpu_layers": -1, "use_extra_bufts": True, "vocab_only": False},
    "llama_context_default_params": {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "type_k": 1},
}
"""Fields that llama.cpp presets, by the function that does: what they hold shows whether the fields lie where they are
described."""


class ModelSettings(ctypes.Structure):
    """`llama_model_params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("devices", "tensor_buft_overrides")),
        *((name, ctypes.c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "progress_callback", "progress_data", "kv_overrides")),
        *((name, ctypes.c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts")),
        *((name, ctypes.c_bool) for name in ("no_host", "no_alloc", "load_mtp")),
    ]


class ContextSettings(ctypes.Structure):
    """`llama_context_params`."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, ctypes.c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, ctypes.c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type")),
        *((name, ctypes.c_int32) for name in ("pooling_type", "attention_type", "flash_attn_type")),
        *((name, ctypes.c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor")),
        *((name, ctypes.c_float) for name in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag_thold", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("cb_eval", "cb_eval_user_data")),
        *((name, ctypes.c_int32) for name in ("type_k", "type_v")),
        ("moe_cache_size", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("abort_callback", "abort_callback_data")),
        *((name, ctypes.c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full")),
        ("kv_unified", ctypes.c_bool),
        ("samplers", ctypes.c_void_p),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", ctypes.c_void_p),
    ]


POINTER, NUMBER, FLAG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
PLACE = ctypes.POINTER(NUMBER)
LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, POINTER)
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LOG, POINTER)),
    "llama_model_default_params": (ModelSettings, ()),
    "llama_context_default_params": (ContextSettings, ()),
    "llama_model_load_from_file": (POINTER, (ctypes.c_char_p, ModelSettings)),
    "llama_model_free": (None, (POINTER,)),
    "llama_model_get_vocab": (POINTER, (POINTER,)),
    "llama_model_n_layer": (NUMBER, (POINTER,)),
    "llama_model_n_head_kv": (NUMBER, (POINTER,)),
    "llama_model_meta_val_str": (NUMBER, (POINTER, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)),
    "llama_vocab_n_tokens": (NUMBER, (POINTER,)),
    "llama_init_from_model": (POINTER, (POINTER, ContextSettings)),
    "llama_free": (None, (POINTER,)),
    "llama_n_ctx": (ctypes.c_uint32, (POINTER,)),
    "llama_n_seq_max": (ctypes.c_uint32, (POINTER,)),
    "llama_n_threads": (NUMBER, (POINTER,)),
    "llama_get_memory": (POINTER, (POINTER,)),
    "llama_memory_seq_rm": (FLAG, (POINTER, NUMBER, NUMBER, NUMBER)),
    "llama_memory_seq_cp": (None, (POINTER, NUMBER, NUMBER, NUMBER, NUMBER)),
    "llama_batch_ext_init": (POINTER, (POINTER,)),
    "llama_batch_ext_free": (None, (POINTER,)),
    "llama_batch_ext_clear": (None, (POINTER,)),
    "llama_batch_ext_add_token": (NUMBER, (POINTER, NUMBER, NUMBER)),
    "llama_batch_ext_set_pos": (FLAG, (POINTER, NUMBER, PLACE)),
    "llama_batch_ext_set_output_logits": (FLAG, (POINTER, NUMBER, FLAG)),
    "llama_process": (NUMBER, (POINTER, ctypes.c_int, POINTER)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (POINTER, NUMBER)),
}
"""The functions that are used: what they return, and take."""


def drop_line(level: int, line: bytes, data: int) -> None:
    """Drop a line that llama.cpp would write to the standard error."""


DROP_LINE = LOG(drop_line)


def open_library() -> Any:
    """Open the library. Raises RuntimeFailure for another version than VERSION, whose structures are not known."""
    remedy = "Type: pip install 'laconic[llamacpp]'"
    if xllamacpp.__version__ != VERSION:
        raise RuntimeFailure(
            f"xllamacpp {xllamacpp.__version__} is installed, and version {VERSION} is the one that can be used. "
            f"{remedy}"
        )
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for name, expected in DEFAULTS.items():
        settings = getattr(library, name)()
        if {field: getattr(settings, field) for field in expected} != expected:
            raise RuntimeFailure(f"xllamacpp {VERSION} is another build than the one that is known. {remedy}")
    library.llama_log_set(DROP_LINE, None)
    library.llama_backend_init()
    return library


@dataclass(frozen=True)
class Reading:
    """Tokens of a text that are read. text: its number in the cache. start: of the first, among the text's tokens.
    kept: tokens, from the last one, behind which the logits are wanted."""

    text: int
    tokens: Sequence[int]
    start: int
    kept: int = 1


class LlamaModel:
    """A model in llama.cpp, on the CPU, and one cache for the tokens of all texts, each named by a number below TEXTS.

    vocabulary: tokens that there are. token_bytes: of a token in the cache, whose keys and values are in FP16.
    """

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        """path: a GGUF file. Raises RuntimeFailure where llama.cpp refuses it."""
        self._library = open_library()
        settings = self._library.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._threads = threads
        self._context: int | None = None
        self._name = path.name
        self._model = None
        if not path.is_file():
            raise RuntimeFailure(f"{path} is missing. Compress the model with --engine-only llamacpp")
        self._model = self._library.llama_model_load_from_file(str(path).encode(), settings)
        if self._model is None:
            raise RuntimeFailure(
                f"llama.cpp does not read {path}: it is no GGUF file of a language model that it knows"
            )
        self.vocabulary = int(self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model)))
        family = self._read_key("general.architecture")
        width = sum(int(self._read_key(f"{family}.attention.{part}_length")) for part in ("key", "value"))
        heads = self._library.llama_model_n_layer(self._model) * self._library.llama_model_n_head_kv(self._model)
        self.token_bytes = 2 * heads * width

    def _read_key(self, key: str) -> str:
        """Read a value of the file's metadata. Raises RuntimeFailure where it has none."""
        buffer = ctypes.create_string_buffer(64)
        if self._library.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer)) < 0:
            raise RuntimeFailure(f"{self._name} does not say {key!r}. Compress the model again")
        return buffer.value.decode()

    def open_cache(self, tokens: int) -> None:
        """Open the cache anew, without texts. tokens: that it holds, of all texts. Raises RuntimeFailure where there is
        no memory for it."""
        self._close_cache()
        settings = self._library.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = min(tokens, MOST_TOKENS), BATCH, BATCH
        settings.n_seq_max = settings.n_outputs_max = TEXTS
        settings.n_outputs_max_per_seq = 0
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.kv_unified = True
        self._context = self._library.llama_init_from_model(self._model, settings)
        if self._context is None:
            raise RuntimeFailure(f"llama.cpp has no memory for a cache of {tokens} tokens. Give a smaller kv_cache")
        opened = [getattr(self._library, f"llama_{name}")(self._context) for name in ("n_seq_max", "n_threads")]
        if opened != [TEXTS, self._threads] or self._library.llama_n_ctx(self._context) < min(tokens, MOST_TOKENS):
            raise RuntimeFailure("llama.cpp did not take its settings")
        self._memory = self._library.llama_get_memory(self._context)
        self._batch = self._library.llama_batch_ext_init(self._context)

    def read(self, readings: Sequence[Reading]) -> list[Array]:
        """Read tokens of several texts, BATCH at most, with the logits of TEXTS at most. Return those of each reading,
        [kept, vocabulary] float32, which the next call overwrites. Raises RuntimeFailure."""
        library, batch, place = self._library, self._batch, NUMBER()
        library.llama_batch_ext_clear(batch)
        wanted: list[int] = []
        for reading in readings:
            first = len(reading.tokens) - reading.kept
            for index, token in enumerate(reading.tokens):
                slot = library.llama_batch_ext_add_token(batch, reading.text, token)
                place.value = reading.start + index
                taken = slot >= 0 and library.llama_batch_ext_set_pos(batch, slot, place)
                if taken and index >= first:
                    taken = library.llama_batch_ext_set_output_logits(batch, slot, True)
                    wanted.append(slot)
                if not taken:
                    raise RuntimeFailure("llama.cpp does not take these tokens")
        if (code := library.llama_process(self._context, DECODE, batch)) != 0:
            raise RuntimeFailure(f"llama.cpp failed while it read tokens (code {code})")
        rows = [self._find_logits(slot) for slot in wanted]
        ends = np.cumsum([each.kept for each in readings])
        return [self._stack(rows[end - each.kept : end]) for each, end in zip(readings, ends, strict=True)]

    def _find_logits(self, slot: int) -> Array:
        return np.ctypeslib.as_array(self._library.llama_get_logits_ith(self._context, slot), (self.vocabulary,))

    def _stack(self, rows: Sequence[Array]) -> Array:
        """Return rows as one array, without a copy where there is one."""
        return rows[0][None] if len(rows) == 1 else np.stack(rows) if rows else np.empty((0, self.vocabulary))

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Let a text begin with the first tokens of another, which both then share."""
        self._library.llama_memory_seq_cp(self._memory, source, target, 0, tokens)

    def forget(self, text: int, start: int = 0) -> None:
        """Forget the tokens of a text from one on."""
        self._library.llama_memory_seq_rm(self._memory, text, start, -1)

    def close(self) -> None:
        """Release the memory."""
        self._close_cache()
        if self._model is not None:
            self._library.llama_model_free(self._model)
        self._model = None

    def _close_cache(self) -> None:
        if self._context is not None:
            self._library.llama_batch_ext_free(self._batch)
            self._library.llama_free(self._context)
        self._context = None
