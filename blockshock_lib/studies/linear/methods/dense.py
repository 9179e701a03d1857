"""The methods that multiply densely: what Block-Shock is compared with."""

from blockshock_lib.studies.linear.methods.method import Cost, Method, Shape, dense_wgrad, summed, summed_dgrad


class RowParallel(Method):
    def cost_dgrad(self, shape: Shape) -> Cost:
        return _gathering(shape, shape.y, shape.x)


class ColumnParallel(Method):
    def cost(self, shape: Shape) -> Cost:
        return _gathering(shape, shape.x, shape.y)

    def cost_dgrad(self, shape: Shape) -> Cost:
        forward, sent = self.cost(shape), 2 * shape.gathered(shape.x)
        read, peak = forward.weights + shape.y / shape.world_size, forward.weights + shape.x
        return Cost(forward.flops, read, shape.x, sent, forward.weights, peak)

    def cost_wgrad(self, shape: Shape, by: str = "full") -> Cost:
        return dense_wgrad(shape, shape.out_features / shape.world_size, shape.in_features)


class MaskedDense(Method):
    def cost_wgrad(self, shape: Shape, by: str = "full") -> Cost:
        """The dense product, then one pass over it that writes zeros in the holes."""
        product = super().cost_wgrad(shape)
        return product._replace(read=product.read + product.written, written=2 * product.written)

    def held_bytes(self, shape: Shape, optimizer: str) -> tuple[float, float]:
        return self.cost(shape).weights, shape.pattern if optimizer else 0.0


class PermutedDense(Method):
    """Each class of rows multiplies its half of the columns."""

    def cost(self, shape: Shape) -> Cost:
        k = shape.term_columns
        return summed(shape, k, shape.out_features * k / 2, extra=self.extra(shape))

    def cost_dgrad(self, shape: Shape) -> Cost:
        k = shape.term_columns
        return summed_dgrad(shape, k, shape.out_features * k / 2, extra=self.extra(shape))

    def extra(self, shape: Shape) -> float:
        """Bytes of the temporaries beside the partial y, or dX."""
        x = shape.batch * shape.term_columns * shape.itemsize
        return x / 2 if shape.mask.family == "uniform" else max(x, shape.y)

    def cost_wgrad(self, shape: Shape, by: str = "periodic") -> Cost:
        k = shape.term_columns
        product = dense_wgrad(shape, shape.out_features, k / 2)
        x = shape.batch * k * shape.itemsize
        gathered = x / 2 if shape.mask.family == "uniform" else x + shape.y
        return product._replace(read=shape.y + x, peak=product.peak + gathered)

    def wgrad_choice(self, shape: Shape) -> str:
        return "periodic"


class FoldedDense(PermutedDense):
    """D folded: as D, without a copy, where a model's other layers are made for it."""

    def extra(self, shape: Shape) -> float:
        return 0.0

    def cost_dgrad(self, shape: Shape) -> Cost:
        cost = super().cost_dgrad(shape)
        if shape.term_columns == shape.in_features:
            return cost
        # It writes its columns straight into zeros.
        made = shape.batch * shape.term_columns * shape.itemsize
        return cost._replace(read=cost.read - made, written=cost.written - made, peak=cost.peak - made)

    def cost_wgrad(self, shape: Shape, by: str = "periodic") -> Cost:
        product = super().cost_wgrad(shape)
        return product._replace(peak=product.written)


def _gathering(shape: Shape, given: float, made: float) -> Cost:
    """Of ranks that each make their share of `made` bytes from all of `given`, and all-gather it."""
    entries, shard = shape.out_features * shape.in_features / shape.world_size, made / shape.world_size
    weights = entries * shape.itemsize
    peak = weights + made + shard
    return Cost(2.0 * shape.batch * entries, weights + given, shard, shape.gathered(made), weights, peak)


ROWS = tuple(
    kind(*looks, f"blockshock_lib.layers:{layer}", split, periodic_only=kind is PermutedDense)
    for kind, *looks, layer, split in (
        (Method, "dense", "A dense", "A", "#4D4D4D", "s", "DenseLinear", "none"),
        (RowParallel, "row_parallel", "B1 row-parallel", "B1", "#0072B2", "o", "RowParallelLinear", "in"),
        (ColumnParallel, "column_parallel", "B2 column-parallel", "B2", "#56B4E9", "D", "ColumnParallelLinear", "out"),
        (MaskedDense, "masked_dense", "C masked dense", "C", "#E69F00", "^", "MaskedDenseLinear", "terms"),
        (PermutedDense, "permuted_dense", "D permuted dense", "D", "#009E73", "v", "PermutedDenseLinear", "terms"),
    )
)
_LOOKS = ("folded_dense", "D folded", "D folded", "#000000", "<")
_LAYER = "blockshock_lib.studies.linear.folded:FoldedDenseLinear"
ROWS += (FoldedDense(*_LOOKS, _LAYER, "terms", periodic_only=True, folded=True),)
