"""D folded: D without a copy, where a model's other layers are made for it."""

from blockshock_lib.studies.linear.methods.dense import PermutedDense
from blockshock_lib.studies.linear.methods.method import Cost, Shape


class FoldedDense(PermutedDense):
    """As D, without a copy."""

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


_LAYER = "blockshock_lib.studies.linear.folded:FoldedDenseLinear"
_LOOKS = ("folded_dense", "D folded", "D folded", "#000000", "<")
ROWS = (FoldedDense(*_LOOKS, _LAYER, "terms", periodic_only=True, folded=True),)
