"""Quantization of a language model a layer at a time, in a folder from which it resumes."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.out_of_core.hidden_states import HiddenStates
from compress.out_of_core.layer_loop import LayerLoop, observe_linear_inputs
from compress.out_of_core.layer_rounding import InputMoments, divide_outputs, find_linear, restore_linear, round_linear
from compress.out_of_core.layer_scaling import LayerScales, scale_layer
from compress.out_of_core.layer_settings import LayerSettings
from laconic.arrays import Array, Arrays
from laconic.models.decoder_cache import describe_logits
from laconic.models.language_model import measure_log_likelihoods
from laconic.progress import Step, Steps
from laconic.quantization.plan import QuantizedWeight
from laconic.runtimes.predict import gather_rows
from laconic.tasks.decoder_tensors import GROUPS, LOG_LIKELIHOODS, OUTPUTS
from laconic.weight_formats.compressed_tensors_format import CompressedTensorsFormat
from laconic.weight_formats.weight_format import LinearWeight

TOKENS = 512
"""Tokens whose logits are computed at once: of 128,256 tokens they have 263 MB."""


class LayerwiseRun:
    """The layers of a model, each read, quantized and written before the next.

    The folder holds a file of weights for each layer that is done, and the hidden states that the next layer reads: of
    all texts as the original layers make them, first those that calibrate and then those that judge; and behind them
    of those that judge, as the quantized layers make them. Each file appears when it is whole, so that a run that is
    killed goes on at the layer where it was, and ends with the same bytes.
    """

    def __init__(
        self, loop: LayerLoop, calibrate: Sequence[Arrays], judge: Sequence[Arrays], settings: LayerSettings,
        folder: Path,
    ) -> None:  # fmt: skip
        """calibrate, judge: encoded texts, [1, tokens] by input. folder: that the run resumes from."""
        self.loop, self.calibrate, self.judge = loop, calibrate, judge
        self.settings, self.folder = settings, folder
        self.texts = [*calibrate, *judge]
        paths = {layer: loop.model.find_path(layer) for layer in loop.layers}
        self.paths = [paths[layer] for layer in loop.layers]
        linear = [f"{paths[layer]}.{path}" for layer in loop.layers for path in find_linear(layer)]
        self.rounded = frozenset(settings.select(linear))
        self._unscaled: set[str] = set()

    @property
    def files(self) -> list[Path]:
        """The files of the layers' weights, in order."""
        return [self.folder / f"layer-{number:05d}.safetensors" for number in range(len(self.loop.layers))]

    def states_before(self, number: int) -> HiddenStates:
        """Return the hidden states that a layer reads; of the number behind the last layer, those that it makes."""
        lengths = [text["input_ids"].shape[1] for text in (*self.texts, *self.judge)]
        return HiddenStates(self.folder / f"states-{number:05d}.bin", lengths, self.loop.width)

    def quantize(self, steps: Steps) -> None:
        """Quantize the layers that are not done."""
        count = len(self.loop.layers)
        with steps.step("quantize the layers", count) as step:
            first = max((number for number in range(count + 1) if self.states_before(number).path.is_file()), default=0)
            if first:
                steps.report("resumed", f"{first} of {count} layers were done")
            elif not self.states_before(0).path.is_file():
                with self.loop.model.loaded(self.loop.embeddings):
                    texts = (*self.texts, *self.judge)
                    self.states_before(0).write(self.loop.embed(torch.from_numpy(each["input_ids"])) for each in texts)
            step.advance(first)
            start = time.perf_counter()
            for number in range(first, count):
                self._quantize_layer(number)
                step.advance()
                step.note = f"{(time.perf_counter() - start) / (number + 1 - first):.1f} s a layer"
        if self._unscaled:
            paths = ", ".join(sorted(self._unscaled))
            steps.warn(f"the inputs of {paths} are not scaled: nothing before them in the layer takes factors")

    def _quantize_layer(self, number: int) -> None:
        before, after = self.states_before(number), self.states_before(number + 1)
        with self.loop.model.loaded(self.loop.layers[number]):
            after.write(self._advance_states(number, before))
        before.path.unlink()

    def _advance_states(self, number: int, before: HiddenStates) -> Iterator[Tensor]:
        """Yield the hidden states after a layer; between those of the original and those of the quantized layer, round
        its weights and write them."""
        layer, moments = self.loop.layers[number], InputMoments()
        with observe_linear_inputs(layer, moments.add):
            for index in range(len(self.calibrate)):
                yield self.loop.run(number, before.read(index))
        for index in range(len(self.calibrate), len(self.texts)):
            yield self.loop.run(number, before.read(index))
        scales = self._scale(number, before, moments)
        rounded = dict(self._round(number, layer, moments, scales))
        self._write_layer(number, rounded, scales.changed)
        for index in range(len(self.texts), len(before.lengths)):
            yield self.loop.run(number, before.read(index))

    def _scale(self, number: int, before: HiddenStates, moments: InputMoments) -> LayerScales:
        """Scale the inputs of a layer up, by AWQ, in place; nothing by other methods."""
        if not self.settings.scales_inputs:
            return LayerScales()
        prefix = f"{self.paths[number]}."
        rounded = frozenset(path.removeprefix(prefix) for path in self.rounded if path.startswith(prefix))
        scales = scale_layer(self.loop, number, before.read(0), moments, rounded, self.settings.config)
        self._unscaled |= set(scales.unscaled)
        return scales

    def _round(
        self, number: int, layer: nn.Module, moments: InputMoments, scales: LayerScales
    ) -> Iterator[tuple[str, Tensor]]:
        """Round the linear modules of a layer in place; yield the tensors that they are stored as, by name."""
        linear = find_linear(layer)
        seen: set[str] = set()
        divisors = scales.divisors
        for paths, gram in moments.take_means():
            seen |= set(paths)
            for path in paths:
                yield from self._round_linear(f"{self.paths[number]}.{path}", linear[path], gram, divisors.get(path))
        for path in linear.keys() - seen:  # such as an expert that no text reaches, and all where inputs are scaled
            yield from self._round_linear(f"{self.paths[number]}.{path}", linear[path], None, divisors.get(path))

    def _round_linear(
        self, path: str, module: nn.Linear, gram: Array | None, divisors: Array | None
    ) -> Iterator[tuple[str, Tensor]]:
        if path not in self.rounded:
            return
        settings = self.settings
        weight: QuantizedWeight = round_linear(module.weight, gram, settings.precision, settings.config)
        weight = weight if divisors is None else divide_outputs(weight, divisors)
        restore_linear(module, weight)
        for part, tensor in CompressedTensorsFormat.store(LinearWeight(weight, settings.bits)).items():
            yield f"{path}.{part}", tensor

    def _write_layer(self, number: int, rounded: dict[str, Tensor], changed: Sequence[str]) -> None:
        """Write the weights of a layer: rounded ones; norms and biases that changed, in FP32; and the others as they
        are stored."""
        layer, path = self.loop.layers[number], self.paths[number]
        rounded |= {f"{path}.{name}": layer.get_parameter(name).data for name in changed}
        replaced = {*(f"{name}.weight" for name in self.rounded), *rounded}
        names = [f"{path}.{name}" for name in layer.state_dict() if f"{path}.{name}" not in replaced]
        file = self.files[number]
        partial = file.with_suffix(".partial")
        save_file(self.loop.model.read(names) | rounded, partial, metadata={"format": "pt"})
        partial.replace(file)

    def compare(self, steps: Steps) -> tuple[Arrays, Arrays]:
        """Return what the original and the quantized model answer to the texts that judge: [texts, ...] by name."""
        states, count = self.states_before(len(self.loop.layers)), len(self.judge)
        with steps.step("compare with the original", 2 * count) as step, self.loop.model.loaded(self.loop.head):
            starts = (len(self.calibrate), len(self.texts))
            reference, outputs = (gather_rows(self._answer(states, start, step), count) for start in starts)
        return reference, outputs

    @torch.inference_mode()
    def _answer(self, states: HiddenStates, start: int, step: Step) -> Iterator[tuple[Array, Arrays]]:
        for index, text in enumerate(self.judge):
            ids, mask = (torch.from_numpy(text[name]) for name in ("input_ids", "attention_mask"))
            hidden = self.loop.finish(states.read(start + index))
            pieces = [self._describe(hidden, ids, mask, place) for place in range(0, ids.shape[1], TOKENS)]
            yield (
                np.array([index]),
                {name: np.concatenate([piece[name] for piece in pieces], axis=1) for name in pieces[0]},
            )
            step.advance()

    def _describe(self, hidden: Tensor, ids: Tensor, mask: Tensor, start: int) -> Arrays:
        """Describe the logits of TOKENS tokens from `start` on."""
        piece = slice(start, start + TOKENS)
        # One token more: the likelihood of the token that follows the last one of the piece is among its logits.
        logits = self.loop.model.module.compute_logits(hidden[:, start : start + TOKENS + 1])
        likelihoods = measure_log_likelihoods(logits, ids[:, start : start + TOKENS + 1])[:, :TOKENS]
        described = describe_logits(logits[:, :TOKENS], mask[:, piece], GROUPS)
        arrays = dict(zip(OUTPUTS, described, strict=True)) | {LOG_LIKELIHOODS: likelihoods}
        return {name: tensor.numpy() for name, tensor in arrays.items()}
