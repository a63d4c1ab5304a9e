"""The inputs of a plain module are found from samples, and from runs with other sizes."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.capture.capture import capture
from laconic.errors import CaptureError, SourceError
from laconic.models.sample_signature import infer_inputs
from laconic.models.source_loading import load_source

RNG = np.random.default_rng(0)


class Tagger(nn.Module):
    """Ids and a mask of one length, up to 16."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(16, 8)

    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor | None = None) -> Tensor:
        found = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return (found * mask[..., None]).sum(dim=1)


class Strided(nn.Module):
    """An image of any size, in three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        return self.layer(image).mean(dim=(2, 3))


class Single(nn.Module):
    """One sample at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(1, 4)


def test_axes_that_only_change_together_are_one_and_those_of_an_image_are_free_one_by_one():
    samples = {"ids": np.ones((9, 10), np.int64), "mask": np.ones((9, 10), np.float32), "label": np.zeros(9)}
    ids, mask = infer_inputs(Tagger().eval(), samples)
    assert (ids.name, ids.dtype, ids.shape) == ("ids", "int64", ("batch", "ids_1"))
    assert (mask.name, mask.dtype, mask.shape) == ("mask", "float32", ("batch", "ids_1"))
    assert ids.bounds == {"ids_1": (5, 10)}, "20 are more than the module has places for"
    samples = {"image": RNG.standard_normal((3, 3, 16, 16)).astype(np.float32)}
    (image,) = infer_inputs(Strided().eval(), samples)
    assert image.shape == ("batch", 3, "image_2", "image_3")
    assert image.bounds == {"image_2": (8, 32), "image_3": (8, 32)}
    edges = RNG.integers(0, 6, (4, 20))
    samples = {"nodes": RNG.standard_normal((4, 6)).astype(np.float32), "sources": edges, "targets": edges}
    found = {spec.name: spec.shape for spec in infer_inputs(Edges().eval(), samples)}
    assert found["sources"] == found["targets"] == ("batch", "sources_1")


class Edges(nn.Module):
    """Along the edges from sources to targets, of which torch lets there be fewer."""

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        return torch.zeros_like(nodes).scatter_add(1, targets, nodes.gather(1, sources))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"idz": np.ones((4, 6), np.int64), "mask": np.ones((4, 6), np.float32)}, "Did you mean 'ids'"),
        ({"ids": np.ones((4, 6), np.int64)}, "lack mask, which forward takes"),
        ({"ids": np.full((4, 6), 90), "mask": np.ones((4, 6), np.float32)}, "does not run on 2 of the samples"),
        ({"ids": np.ones((4, 6), np.int64), "mask": np.float32(3)}, r"'mask' of the samples has the shape \[\]"),
        (
            {"ids": np.ones((0, 6), np.int64), "mask": np.ones((0, 6), np.float32)},
            r"shape \[0, 6\], expected",
        ),
        (
            {"ids": np.ones((4, 6), np.int64), "mask": np.ones((3, 6), np.float32)},
            r"\('ids' 4, 'mask' 3",
        ),
        ({"ids": np.array(["a", "b"]), "mask": np.ones((2, 6), np.float32)}, "'ids' of the samples holds str"),
        ({"ids": np.ones((4, 6)), "mask": np.ones((4, 6))}, r"ids, mask: with \.astype\('float32'\)"),
    ],
)
def test_samples_that_do_not_fit_are_refused_with_what_does(arrays, message):
    with pytest.raises(SourceError, match=message):
        infer_inputs(Tagger().eval(), arrays)


def test_a_module_that_takes_one_sample_at_a_time_is_refused():
    with pytest.raises(SourceError, match="does not run on 2 of the samples"):
        infer_inputs(Single(), {"x": np.ones((6, 4), np.float32)})


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.rnn(packed)[1][0][0]


def test_a_module_is_tried_on_its_samples_where_there_are_any(tmp_path):
    rng = np.random.default_rng(0)
    samples = {"x": rng.standard_normal((6, 12, 8)).astype(np.float32), "lengths": np.array([3, 7, 12, 1, 5, 9])}
    torch.save(Packed().state_dict(), tmp_path / "net.pt")
    checkpoint = load_source(tmp_path / "net.pt", builder=f"{__name__}:Packed", samples=samples, trust=True)
    assert checkpoint.outputs[0].shape == ("batch", 16)
    made = checkpoint.task.sample_inputs({"batch": 5})
    assert made["lengths"].tolist() == [3, 7, 3, 7, 3]
    with pytest.raises(CaptureError, match=r"line \d+ \(.*\) computes with a packed sequence .* by its length$"):
        capture(checkpoint, tmp_path / "graph")
