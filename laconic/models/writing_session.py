"""An encoder-decoder in PyTorch as a session that is timed while it writes, as transformers does."""

from collections.abc import Mapping

import torch

from laconic.arrays import Array, Arrays
from laconic.models.encoder_decoder import EncoderDecoder
from laconic.models.torch_session import TorchSession
from laconic.tasks.decoder_tensors import NEW_TOKENS, SEQUENCES
from laconic.tasks.generation_settings import GenerationSettings


class WritingSession(TorchSession):
    """Runs targets as every module; where `new_tokens` is among the inputs, so many tokens are written instead."""

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        if NEW_TOKENS not in inputs:
            return super().run(inputs)
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            source = {name: torch.from_numpy(array) for name, array in inputs.items() if name != NEW_TOKENS}
            assert isinstance(self.module, EncoderDecoder)
            written = self.module.generate(source, GenerationSettings.of_length(int(inputs[NEW_TOKENS])))
        finally:
            torch.set_num_threads(before)
        return {SEQUENCES: written.numpy()}
