"""Which kernels torch.compile calls for the products of a graph, read from the program that its compiler wrote.

The compiler (Inductor, torch 2.13) writes a Python program. Before a call stand the names of the nodes that it came
from, unless a pass fused them; then the calls of a kind are in the order of the products.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch._inductor.graph import GraphLowering

from laconic.runtimes.runtime import Kernel

SOURCES = re.compile(r"# Topologically Sorted Source Nodes: \[([^]]*)\]")
CALL = re.compile(r"(?:torch\.ops|extern_kernels)\.([\w.]+?)(?:\.default)?\((.*)|(triton_tem_\w+)\.run\((.*)")
VARIABLE = re.compile(r"(\w+) = (?:empty_strided_\w+\(.*|None  # device.*?)torch\.(\w+)")
KINDS = {
    "linear": re.compile(r"linear|addmm|mm(?!\w)|_mm"),
    "convolution": re.compile(r"conv"),
    "matmul": re.compile(r"bmm|baddbmm|attention"),
}
"""By the kind of a product, how the names of the kernels for it are told."""
_RECORDING = threading.Lock()


@dataclass(frozen=True)
class KernelCall:
    """A call in a compiled program. sources: names of the nodes that it came from. dtype: that of an operand; empty
    where it is not told."""

    name: str
    sources: tuple[str, ...]
    dtype: str

    @property
    def kind(self) -> str:
        """The kind of product that it computes; empty for none."""
        return next((kind for kind in reversed(KINDS) if KINDS[kind].search(self.name)), "")


@contextmanager
def record_programs() -> Iterator[list[str]]:
    """The programs that are compiled in the body, or found in the compiler's cache; one thread at a time."""
    programs: list[str] = []
    with _RECORDING:
        usual = GraphLowering.save_output_code
        GraphLowering.save_output_code = staticmethod(programs.append)
        try:
            yield programs
        finally:
            GraphLowering.save_output_code = usual if usual is None else staticmethod(usual)


def parse_calls(program: str) -> list[KernelCall]:
    """The calls of products in a compiled program, in order."""
    dtypes: dict[str, str] = {}
    sources: tuple[str, ...] = ()
    calls = []
    for line in program.splitlines():
        if named := SOURCES.search(line):
            sources = tuple(named[1].split(", "))
        elif variable := VARIABLE.search(line):
            dtypes[variable[1]] = variable[2]
        elif call := CALL.search(line):
            name, operands = call[1] or call[3], re.findall(r"\w+", call[2] or call[4])
            found = KernelCall(name, sources, next((dtypes[each] for each in operands if each in dtypes), ""))
            if found.kind:
                calls.append(found)
                sources = ()
    return calls


def find_kernels(products: Sequence[Kernel], names: Sequence[str], program: str) -> list[Kernel]:
    """The kernels that compute products in a compiled program. A product whose call is not found stays as it is.

    products: as they were asked for. names: of the node of each in the module that was compiled.
    """
    found = list(products)
    calls = parse_calls(program)
    places = {name: place for place, name in enumerate(names)}
    left = []
    for call in calls:
        own = [places[name] for name in call.sources if name in places]
        if own and products[own[-1]].kind == call.kind:
            found[own[-1]] = name_kernel(products[own[-1]], call)
            places = {name: place for name, place in places.items() if place != own[-1]}
        else:
            left.append(call)
    for kind in KINDS:
        others, open_places = [call for call in left if call.kind == kind], sorted(places.values())
        unnamed = [place for place in open_places if products[place].kind == kind]
        if len(unnamed) == len(others):
            for place, call in zip(unnamed, others, strict=True):
                found[place] = name_kernel(products[place], call)
    return found


def name_kernel(product: Kernel, call: KernelCall) -> Kernel:
    """The product with the kernel that computes it, in the arithmetic of its operands."""
    return replace(product, kind=call.name, precision=call.dtype or product.precision)
