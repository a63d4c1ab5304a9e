"""The device mesh of a run: the number of model replicas, and of shards of each."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from laconic.config import Strict
from laconic.errors import RecipeError

Parallelism = Literal["replicate", "shard"]
"""What each rank holds: the whole model (data parallelism), or a shard of it (fully sharded data parallelism)."""


class Mesh(Strict):
    """The ranks of a run, and what each axis of them is for. Each rank trains on rows of its own; the gradient, and so
    the result, is that of the whole batch.

    replicate: copies of the model, whose gradients are averaged (DDP: Li et al., arXiv 2006.15704). shard: ranks that
    share one copy: each holds its part of the weights, gradients and optimizer state, and weights are gathered layer by
    layer as they are needed (FSDP: Zhao et al., arXiv 2304.11277; ZeRO: Rajbhandari et al., arXiv 1910.02054). A null
    is replaced by the number of ranks divided by the other. With both, shards are gathered among neighbouring
    ranks and gradients averaged over the copies (hybrid sharding). tensor, pipeline: not implemented; 1.

    compress: for replicas, the precision in which gradients are sent. precision: for shards, the precision in which
    weights are gathered and the model computes; shards and summed gradients stay FP32. offload: shards stay in the
    host's memory, where the optimizer steps.
    """

    replicate: int | None = Field(default=None, ge=1)
    shard: int | None = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    compress: Literal["fp16", "bf16"] | None = None
    precision: Literal["bf16"] | None = None
    offload: bool = False

    @field_validator("tensor", "pipeline")
    @classmethod
    def _one(cls, ranks: int) -> int:
        if ranks != 1:
            raise ValueError(f"{ranks} ranks are not possible yet: layers are not cut, only copied or sharded. Leave 1")
        return ranks

    @model_validator(mode="after")
    def _settings_have_a_place(self) -> Self:
        if self.is_sharded and self.compress:
            raise ValueError("compress is for replicas, and this mesh has shards. Set precision in its place")
        if not self.is_sharded and (self.precision or self.offload):
            name = "precision" if self.precision else "offload"
            raise ValueError(f"{name} is for shards, and this mesh has none. Set shard: null to shard over all ranks")
        return self

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold shards, be it a single rank."""
        return self.shard != 1

    @property
    def parallelism(self) -> Parallelism:
        """What each rank holds."""
        return "shard" if self.is_sharded else "replicate"

    def resolve(self, world: int) -> tuple[int, int]:
        """Return the numbers of replicas and of shards of each for `world` ranks. Raises RecipeError for a mismatch."""
        shard = self.shard or max(1, world // (self.replicate or 1))
        replicate = self.replicate or max(1, world // shard)
        if replicate * shard != world:
            raise RecipeError(
                f"mesh: {replicate} x {shard} ranks (replicate x shard) were expected, and {world} were started. Start "
                f"`torchrun --nproc-per-node {replicate * shard} -m laconic ...`, or set one of them to null"
            )
        return replicate, shard
