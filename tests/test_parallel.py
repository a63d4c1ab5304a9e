"""Several ranks learn as one: the same losses as on one, whatever the mesh."""

import json
import multiprocessing
import os
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from laconic.errors import RecipeError
from laconic.parallel.mesh import Mesh
from laconic.parallel.ranks import Ranks, started
from laconic.parallel.spread import spread
from laconic.training.assembly import make_kit
from laconic.training.objectives.tensors import Targets
from laconic.training.order import Order
from laconic.training.settings import Training
from laconic.training.snapshot import Snapshots
from laconic.training.step import step

CPU = torch.device("cpu")
COUNT, BATCH, STEPS = 21, 5, 7
"""Ranks have 2 and 3 rows of a batch, and of an epoch's last none and 1."""
SECONDS = 100
EXACT = {"rtol": 0, "atol": 1e-5}


class Classifier(nn.Module):
    """A transformer: [rows, tokens] int64 to [rows, 3]. Its last layer shares its weights with nothing, and `spare` is
    never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 15, dropout=0.0, batch_first=True) for _ in "abc")
        self.spare = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))


def rows_of(numbers):
    torch.manual_seed(1)
    ids, targets = torch.randint(17, (COUNT, 6)), torch.randint(3, (COUNT,))
    return {"ids": ids[numbers], "targets": targets[numbers]}


def settings(mesh, *techniques, optimizer="adamw", **others):
    return Training(
        batch=BATCH,
        mesh=mesh,
        techniques=[*techniques],
        optimizer={optimizer: {"lr": 1e-2}},
        clip=0.5,
        **others,
    )


def assembled(training, ranks, model=None):
    """A kit, and its learning-rate-free optimizer."""
    kit = make_kit(model or Classifier(), Targets(None), training.parts(), CPU)
    spread(kit, training, ranks)
    kit.assemble()
    return kit


def learn(kit, training, ranks, start=0, stop=STEPS):
    order = Order(COUNT, training.batch, seed=0, rank=ranks.rank, world=ranks.world)
    return [float(step(kit, rows_of(order.batch(number)), clip=training.clip)) for number in range(start, stop)]


def losses_of(training, ranks):
    kit = assembled(training, ranks)
    losses = learn(kit, training, ranks)
    return losses, kit.finish()
