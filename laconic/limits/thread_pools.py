"""Thread pools of libraries that count cores by affinity alone, held to the CPU quota of the container."""

import os

from laconic.limits.cgroups import read_cpu_quota

VARIABLES = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
"""Where libraries read their number of threads or processes. OpenMP, MKL and OpenBLAS follow the first, and with them
torch and numpy; engines get their threads from Laconic."""


def limit_thread_pools() -> None:
    """Have libraries start no more threads than the CPU quota pays for; a variable that the user has set stays.

    Effective for libraries that are imported later, and for child processes.
    """
    quota = read_cpu_quota()
    if quota is not None and quota.whole_cores < len(os.sched_getaffinity(0)):
        for variable in VARIABLES:
            os.environ.setdefault(variable, str(quota.whole_cores))
