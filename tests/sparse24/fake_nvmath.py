"""nvmath.bindings.cusparseLt on the CPU, as far as plans.py calls it: objects are numbers, their end is noted."""

import ctypes
import itertools
from types import SimpleNamespace


class Library:
    """`made` maps an object to its making, `freed` lists those given back; `fails` names what cannot be made.

    `taken` is what was asked of the allocator, `left` what was not given back.
    """

    class cuSPARSELtError(Exception):
        pass

    Sparsity = SimpleNamespace(SPARSITY_50_PERCENT=0)
    ComputeType = SimpleNamespace(COMPUTE_32F=1)
    MatmulAlg = SimpleNamespace(DEFAULT=0)
    MatmulAlgAttribute = SimpleNamespace(CONFIG_ID="alg_id", SPLIT_K="split_k", SPLIT_K_MODE="split_k_mode")
    MatmulDescAttribute = SimpleNamespace(BIAS_POINTER="bias")

    def __init__(self, version=801):
        self.version, self.fails, self.taken, self.left = version, "", [], []
        self.numbers, self.made, self.freed, self.plans, self.attributes, self.ran = (
            itertools.count(1),
            {},
            [],
            {},
            {},
            [],
        )

    def _make(self, name, *args):
        if self.fails == name:
            raise self.cuSPARSELtError(name)
        number = next(self.numbers)
        self.made[number] = (name, args)
        return number

    def init(self):
        return 1000

    def get_version(self, handle):
        return self.version

    def structured_descriptor_init(self, handle, *args):
        return self._make("weight", *args)

    def dense_descriptor_init(self, handle, *args):
        return self._make("dense", *args)

    def matmul_descriptor_init(self, handle, *args):
        return self._make("product", *args)

    def matmul_alg_selection_init(self, handle, *args):
        return self._make("algorithm", *args)

    def matmul_plan_init(self, handle, product, algorithm):
        return self._make("plan", product, algorithm)

    def matmul_get_workspace(self, handle, plan):
        return 64

    def _set(self, handle, thing, attribute, address, size):
        kind = ctypes.c_int if size == 4 else ctypes.c_void_p
        self.attributes.setdefault(thing, {})[attribute] = kind.from_address(address).value

    matmul_alg_set_attribute = matmul_desc_set_attribute = _set

    def _free(self, thing):
        self.freed.append(thing)

    mat_descriptor_destroy = matmul_descriptor_destroy = matmul_alg_selection_destroy = matmul_plan_destroy = _free

    def take(self, size, stream):
        self.taken.append((size, stream))
        self.left.append(len(self.taken))
        return len(self.taken)

    def give_back(self, address):
        self.left.remove(address)

    def matmul(self, handle, plan, alpha, a, b, beta, c, d, workspace, streams, count):
        if self.fails == "matmul":
            raise self.cuSPARSELtError("matmul")
        numbers = [ctypes.c_float.from_address(at).value for at in (alpha, beta)]
        stream = ctypes.c_void_p.from_address(streams).value
        assert not workspace or workspace in self.left
        self.ran.append(
            SimpleNamespace(
                plan=plan, a=a, b=b, c=c, d=d, numbers=numbers, workspace=workspace, stream=stream, count=count
            )
        )
