"""The digest of a plan, for keys of the cache."""

from laconic.hashing import digest_arrays, hash_of
from laconic.quantization.plan import Plan


def digest_plan(plan: Plan) -> str:
    """Return the digest of everything that is planned: plans with the same digest give the same graph."""
    return hash_of(
        sorted(plan.precision.items()),
        sorted((name, limits.low, limits.high) for name, limits in plan.ranges.items()),
        sorted(
            (name, smoothing.limits.low, smoothing.limits.high, digest_arrays({"factors": smoothing.factors}))
            for name, smoothing in plan.smoothing.items()
        ),
        sorted((*layer, weight.group_size, digest_arrays(weight.arrays)) for layer, weight in plan.weights.items()),
        plan.attention,
    )
