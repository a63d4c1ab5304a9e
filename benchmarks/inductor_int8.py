"""PyTorch's own INT8 on a processor: PT2E quantization by torchao for torch.compile."""

import copy

import torch
from torch import nn

from laconic.data.batches import batches
from laconic.data.dataset import Dataset
from laconic.models.checkpoint import Checkpoint


def quantize_for_inductor(original: Checkpoint, few: Dataset) -> nn.Module:
    """Quantize a module with the default settings for processors: activations with calibrated ranges in 8 bits,
    weights per channel. few: what it is calibrated with. Only compiled code computes in INT8.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # warns, and takes seconds
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    samples = [tuple(map(torch.from_numpy, inputs.values())) for _, inputs in batches(few, original.task, 1)]
    example = tuple(torch.cat([each, each]) for each in samples[0])
    auto = torch.export.Dim.AUTO
    dynamic = tuple({0: auto, 1: auto} if each.ndim == 2 else {0: auto} for each in example)
    exported = torch.export.export(copy.deepcopy(original.module), example, dynamic_shapes=dynamic).module()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    with torch.inference_mode():
        for sample in samples:
            prepared(*sample)
    converted = convert_pt2e(prepared)
    return torch.fx.GraphModule(converted, converted.graph)  # without the float weights
