"""The device mesh of a run: replicas of the model, shards of each, and layers that are cut over ranks."""

from math import prod
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from laconic.config import Strict
from laconic.errors import RecipeError

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zbv"]
Axis = Literal["pipeline", "replicate", "shard", "context", "tensor"]
"""What the ranks along an axis of a mesh share, outermost axis first: neighbours exchange the most."""


class AxisSizes(NamedTuple):
    """The number of ranks along each axis of a mesh."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self._asdict().items() if size > 1) or "1 rank"


class Mesh(Strict):
    """The ranks of a run, and what each axis of them is for. Ranks along `replicate` and `shard` train on rows of their
    own; the gradient, and so the result, is that of the whole batch.

    replicate: copies of the model, whose gradients are averaged (DDP: Li et al., arXiv 2006.15704). shard: ranks that
    share one copy: each holds its part of the weights, gradients and optimizer state, and weights are gathered layer by
    layer as they are needed (FSDP: Zhao et al., arXiv 2304.11277; ZeRO: Rajbhandari et al., arXiv 1910.02054). A null
    is replaced by the number of ranks divided by the others. With both, shards are gathered among neighbouring
    ranks and gradients averaged over the copies (hybrid sharding). tensor: ranks that compute a part of the attention
    heads and FFN units of every layer (Shoeybi et al., Megatron-LM, arXiv 1909.08053). sequence: whether these ranks
    have a part of the positions each between attention and FFN, where norms and what is added take less memory then
    (Korthikanti et al., arXiv 2205.05198). context: ranks that have a part of the positions of the same rows each, in
    all layers, and gather the keys and values of all in each attention (Grattafiori et al., The Llama 3 Herd of Models,
    arXiv 2407.21783); shards are spread over these ranks, too. pipeline: ranks that have some of the layers each,
    through which micro-batches pass in the order of `schedule` (Huang et al., GPipe, arXiv 1811.06965).

    compress: for replicas, the precision in which gradients are sent. precision: for shards, the precision in which
    weights are gathered and the model computes; shards and summed gradients stay FP32. offload: shards stay in the
    host's memory, where the optimizer steps. zero: the stage of ZeRO by which DeepSpeed shards over all ranks, in the
    place of FSDP: 1 the state of the optimizer, 2 gradients too, 3 weights too.

    timeout: seconds that ranks wait for one that runs and does not answer. One that ends is noticed at once.

    auto: the planner chooses the axes and the schedule for the ranks that have started; `mesh: auto` in a recipe.
    """

    auto: bool = False
    replicate: int | None = Field(default=None, ge=1)
    shard: int | None = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    sequence: bool = False
    context: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    schedule: ScheduleName = "1f1b"
    compress: Literal["fp16", "bf16"] | None = None
    precision: Literal["bf16"] | None = None
    offload: bool = False
    zero: Literal[1, 2, 3] | None = None
    timeout: float = Field(default=1800.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, values: Any) -> Any:
        return {"auto": True} if values == "auto" else values

    @model_validator(mode="after")
    def _settings_have_a_place(self) -> Self:
        if self.zero is not None:
            self._check_zero()
        if self.auto:
            if sized := {*AxisSizes._fields, "schedule", "sequence"} & self.model_fields_set:
                raise ValueError(
                    f"auto chooses {', '.join(sorted(sized))}, which stands beside it. Leave one of them out"
                )
            return self
        if self.compress and (self.is_sharded or self.tensor > 1 or self.pipeline > 1):
            raise ValueError("compress is for replicas of whole models. Set precision in its place")
        if self.context > 1 and (self.tensor > 1 or self.pipeline > 1):
            raise ValueError("context is for ranks that have whole layers. Leave tensor and pipeline out, or context")
        if self.sequence and (self.tensor == 1 or self.pipeline > 1):
            raise ValueError("sequence spreads positions over the ranks of tensor: 2 or more, without pipeline")
        if self.tensor > 1 and self.pipeline > 1 and self.schedule in ("interleaved", "zbv"):
            raise ValueError(f"tensor takes one stage on a rank, and {self.schedule} has two. Set schedule: 1f1b")
        if not self.is_sharded and (self.precision or self.offload):
            name = "precision" if self.precision else "offload"
            raise ValueError(f"{name} is for shards, and this mesh has none. Set shard: null to shard over all ranks")
        return self

    def _check_zero(self) -> None:
        """Raise ValueError for what DeepSpeed does not do here."""
        others = {"auto", "replicate", "context", "tensor", "pipeline", "precision", "offload"}
        if named := sorted(others & {name for name in self.model_fields_set if getattr(self, name)}):
            raise ValueError(
                f"zero has DeepSpeed shard over all ranks, and {named[0]} is for other meshes. Leave one of them out"
            )
        if self.shard is not None:
            raise ValueError("zero shards over all ranks. Set shard: null beside it")

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold shards, be it a single rank."""
        return self.shard != 1

    @property
    def parallelism(self) -> tuple[str, ...]:
        """What the ranks share: axes of the mesh, and "zero" where DeepSpeed shards, as techniques and optimizers name
        what they cannot be combined with."""
        data = ["shard" if self.is_sharded else "replicate"] + ["zero"] * (self.zero is not None)
        cuts: tuple[Axis, ...] = ("context", "tensor", "pipeline")
        return (*data, *(axis for axis in cuts if getattr(self, axis) > 1))

    def resolve(self, world: int) -> AxisSizes:
        """Return the sizes of all axes for `world` ranks. Raises RecipeError for a mismatch."""
        rest = world // (self.context * self.tensor * self.pipeline)
        shard = self.shard or max(1, rest // (self.replicate or 1))
        replicate = self.replicate or max(1, rest // shard)
        sizes = AxisSizes(self.pipeline, replicate, shard, self.context, self.tensor)
        if prod(sizes) != world:
            raise RecipeError(
                f"mesh: {prod(sizes)} ranks ({sizes}) were expected, and {world} were started. Start "
                f"`torchrun --nproc-per-node {prod(sizes)} -m laconic ...`, or set replicate or shard to null"
            )
        return sizes
