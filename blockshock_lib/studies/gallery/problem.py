"""One case of the gallery on one rank: a random weight, its mask by magnitude, and each kernel's product with it."""

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.engine import roofline
from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.engine.study import Check, Problem, Runner
from blockshock_lib.engine.timing import Work
from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.files import seed
from blockshock_lib.kernels.patterns import pattern as patterns
from blockshock_lib.kernels.patterns.pattern import Kernel, Packed, Pattern
from blockshock_lib.kernels.patterns.table import KERNELS, PATTERNS
from blockshock_lib.studies.gallery.methods import METHODS
from blockshock_lib.studies.gallery.params import Case, Params

# fp32 is summed in fp32, by each kernel in an order of its own: right ones were up to 2.8 times as wrong at one entry.
# 16-bit values are summed in fp32 by all of them, and held to the engine's own gate.
LOOSER = {torch.float32: 3.0}
NO_CASE = re.compile(r"\bunsupported|not.?(yet.)?(supported|implemented)|multiples? of", re.I)  # in PyTorch's words
LIBRARIES = ("triton", "nvmath", "cuda")  # that compile; a broken context fails the next call too
TURNED = {"rows": "columns", "columns": "rows"}  # pattern -> that of the transposed weight, where it is another


class Product(NamedTuple):
    """What a work multiplies: y = x W^T, or dX = dy W as the product with the transposed weight."""

    pattern: Pattern
    kernel: Kernel
    weight: Tensor
    mask: Tensor
    x: Tensor

    def expected(self, dtype: torch.dtype) -> Tensor:
        return F.linear(self.x.to(dtype), torch.where(self.mask, self.weight, 0).to(dtype))


class GalleryProblem(Problem):
    """W, x and dy are standard normal, each of a seed of its own; the dense methods multiply all of W."""

    def __init__(self, case: Case, params: Params, **place):
        super().__init__(case, params, **place)
        sizes = {"weight": (case.n, case.k), "x": (case.batch, case.k), "dy": (case.batch, case.n)}
        self.weight, self.x, self.dy = (self._drawn(what, size) for what, size in sizes.items())
        if case.pattern in PATTERNS:
            self.mask = PATTERNS[case.pattern].mask(self.weight.float().abs(), case.sparsity, case.block)
        self.packed: dict[tuple[str, str], Packed] = {}
        self.made: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def _drawn(self, what: str, size: tuple[int, int]) -> Tensor:
        draw = torch.Generator(self.device).manual_seed(seed(self.case.seed, what, self.repeat))
        return torch.randn(size, generator=draw, device=self.device).to(self.dtype)

    def block(self, method: str) -> int:
        return self.case.block if METHODS[method].pattern != "dense" else 0

    def product(self, method: str, work: str) -> Product:
        of, dense = METHODS[method], METHODS[method].pattern == "dense"
        mask = torch.ones_like(self.mask) if dense else self.mask
        if work == "forward":
            return Product(*KERNELS[of.kernel], self.weight, mask, self.x)
        turned = PATTERNS[TURNED.get(of.pattern, of.pattern)]
        kernel = next((one for one in turned.kernels if one.name == of.kernel), turned.kernels[0])
        return Product(turned, kernel, self.weight.t().contiguous(), mask.t().contiguous(), self.dy)

    def unsupported(self, method: str) -> str:
        kernel = KERNELS[METHODS[method].kernel][1]
        return kernel.unsupported(self.device, self.dtype, tuple(self.weight.shape), self.block(method))

    def expected(self, method: str, work: str) -> tuple[Tensor, Tensor]:
        """(truth, baseline): of all sparse methods of a case the same."""
        key = "dense" if METHODS[method].pattern == "dense" else "", work
        if key not in self.made:
            product = self.product(method, work)
            self.made[key] = tuple(product.expected(dtype) for dtype in (torch.float64, self.dtype))
        return self.made[key]

    def prepare(self, method: str) -> None:
        for work in self.case.works:
            self.expected(method, work)

    def build(self, method: str) -> "GalleryRunner":
        return GalleryRunner(self, method)


class GalleryRunner(Runner):
    """A copy has a packed weight of its own."""

    products: Mapping[str, Product] = {}
    lacks: Mapping[str, str] = {}  # by work, why there is none
    pieces: Sequence[str] = ()  # parts that are timed alone and checked in the whole

    def __init__(self, problem: GalleryProblem, method: str):
        self.problem, self.name = problem, method
        self.products = {work: problem.product(method, work) for work in problem.case.works}
        self.packed, self.lacks = {}, {}
        for work, one in self.products.items():
            key = method, work
            if key in problem.packed:
                self.packed[work] = problem.packed[key].copy()
                continue
            try:
                made = one.pattern.pack(one.weight, one.mask, problem.block(method), one.kernel.name)
            except (UnsupportedError, ValueError) as error:  # a transposed mask need not be one of the pattern
                if work == "forward":
                    raise UnsupportedError(first_line(error)) from error
                self.lacks[work] = first_line(error)
                continue
            self.packed[work] = problem.packed[key] = made

    def parts(self) -> Iterable[str]:
        """What is timed."""
        return [work for work in self.products if work not in self.lacks]

    def make(self, work: str) -> Any:
        return self.packed[work].product(self.products[work].x)

    def run(self, work: str) -> Any:
        try:
            return self.make(work)
        except Exception as error:
            if not _no_case(error):
                raise
            raise UnsupportedError(first_line(error)) from error

    def tune(self) -> None:
        for work, packed in self.packed.items():
            packed.tune(self.products[work].x)

    def checks(self, run: CaseRun) -> Iterator[Check]:
        for work, why in self.lacks.items():
            run.miss(self.name, "unsupported", why, f"{work}_kernel")
        for work in (part for part in self.parts() if part not in self.pieces):
            with run.weighed(*(self.problem.expected(self.name, work)[0].shape if self.products else ())):
                made = run.agree(partial(self.run, work))
            yield from self.compared(work, made)

    def compared(self, work: str, made: Tensor) -> Iterator[Check]:
        truth, baseline = self.problem.expected(self.name, work)
        what, detail = ("y", "") if work == "forward" else ("dX", "dx")
        yield Check(what, made, baseline, truth, detail, looser=LOOSER.get(self.problem.dtype, 1.0))

    def weigh(self) -> dict[str, float]:
        one, counts = self.products["forward"], self.counts("forward")
        formula = one.kernel.weight_bytes(counts, one.weight.element_size())
        held = {"packed_bytes": float(self.packed["forward"].nbytes), "packed_bytes_formula": formula}
        return held | {"kept": counts.kept, "rows_kept": counts.rows}

    def counts(self, work: str) -> patterns.Counts:
        return patterns.counts(self.products[work].mask, self.problem.block(self.name))

    def operand_bytes(self) -> int:
        return self.packed["forward"].nbytes

    def works(self, run: CaseRun, copies: Sequence["GalleryRunner"]) -> list[Work]:
        """Kernel time only where a call can be captured in a CUDA graph; what was timed whole is checked again."""
        found = []
        for work in self.parts():
            calls = [partial(one.run, work) for one in copies]
            alone = {"recheck": partial(self.compared, work), "heavy": True, "traced": True}
            alone = alone if work not in self.pieces else {}
            if run.captured(self.name, f"{work}_kernel", calls[0]):
                found.append(Work(f"{work}_kernel", calls, **alone))
                alone = {}
            found.append(Work(f"{work}_call", calls, eager=True, **alone))
        return found

    def facts(self, ceilings: Ceilings) -> dict[str, float]:
        found = {}
        for work, one in self.products.items():
            cost = one.kernel.cost(self.counts(work), len(one.x), one.x.element_size())
            found[f"floor_{work}"] = roofline.compute(cost, ceilings)
            if work == "forward":
                found["flops"] = cost.flops
        return found


def _no_case(error: Exception) -> bool:
    """Whether PyTorch says that it has no such product, or one of LIBRARIES raised it; the rest is a failure."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    names = type(error).__module__, frame.f_globals.get("__name__", "")
    if isinstance(error, NotImplementedError) or any(name.partition(".")[0] in LIBRARIES for name in names):
        return True
    return isinstance(error, RuntimeError) and bool(NO_CASE.search(str(error)))
