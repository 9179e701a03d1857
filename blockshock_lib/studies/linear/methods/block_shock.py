"""Block-Shock: two complementary 2:4 terms, each packed on its own ranks. Three rows: the packed values are trained
(T3), a dense master is packed anew after each step (T1), and the latter by the stock op.

With k = 2 K / w input columns a rank and e bytes an element:
- a packed term has N k / 2 values and 2 bits of metadata for each: N k / 2 (e + 1/4) bytes, 9/16 of dense in 16 bit;
- its pattern is held for training: nothing for a mask that repeats one tile, else one entry a 4x4 tile, 1 byte where
  the mask is transposable and 2 where it is not; with `exchange` half as much again, for half of the other term's rows.
"""

from blockshock_lib.studies.linear.methods.method import Cost, Method, Shape, summed, summed_dgrad


class BlockShock(Method):
    @property
    def stock(self) -> bool:
        return self.product == "torch"

    def cost(self, shape: Shape) -> Cost:
        k = shape.term_columns
        # The 2:4 ops read x as contiguous: from four ranks on, where a rank reads only its columns, they are copied.
        copied = shape.batch * k * shape.itemsize if shape.world_size > 2 else 0
        return summed(shape, k, _kept(shape), _packed(shape), copied)

    def cost_dgrad(self, shape: Shape) -> Cost:
        k, packed = shape.term_columns, _packed(shape)
        if shape.mask.transposable:
            return summed_dgrad(shape, k, _kept(shape), packed)
        cost = summed_dgrad(shape, k)
        if shape.update == "recompress":
            return cost
        # The dense masked weight is written from the packed values, then read.
        read, written = cost.read + _kept(shape) * shape.itemsize, cost.written + _dense(shape)
        return cost._replace(read=read, written=written, weights=packed, peak=cost.peak + packed)

    def cost_wgrad(self, shape: Shape, by: str = "full") -> Cost:
        """Of the gradient in the weight's layout: packed values, or for `recompress` a dense masked matrix."""
        kept, dense, full = _kept(shape) * shape.itemsize, _dense(shape), super().cost_wgrad(shape)
        x = shape.batch * shape.term_columns * shape.itemsize
        if by == "periodic":
            # x is gathered for one class at a time, and dy laid out by residue where there are several classes.
            gathered = x / 2 + (0 if shape.mask.family == "uniform" else shape.y)
            cost = Cost(full.flops / 2, shape.y + x, kept, 0.0, 0.0, kept + gathered)
        elif by == "exchange":
            read, peak = shape.y / 2 + x + dense / 2, dense / 2 + kept * 3 / 2
            cost = Cost(full.flops / 2, read, dense / 2 + kept, kept / 2, 0.0, peak)
        elif self.stock:
            read = full.read + dense + shape.out_features * shape.term_columns
            return full._replace(read=read, written=2 * dense, peak=2 * dense)
        elif shape.update == "recompress":
            return full._replace(read=full.read + dense, written=2 * dense)
        else:
            cost = full._replace(read=full.read + dense, written=dense + kept, peak=dense + kept)
        if shape.update == "packed":
            return cost
        return cost._replace(read=cost.read + kept, written=cost.written + dense, peak=max(cost.peak, dense + kept))

    def wgrad_choice(self, shape: Shape) -> str:
        if shape.dw != "auto":
            return shape.dw
        return "full" if self.stock else "periodic" if shape.mask.periodic else "exchange"

    def cost_post_step(self, shape: Shape) -> dict[str, Cost]:
        kept, dense = _kept(shape) * shape.itemsize, _dense(shape)
        if shape.update == "recompress":
            remask = Cost(0.0, dense, dense, 0.0, dense, dense)
            return {"remask": remask, "compress": remask._replace(written=(1 + shape.mask.transposable) * kept)}
        return {"refresh": Cost(0.0, kept, kept, 0.0, kept, kept)} if shape.mask.transposable else {}

    def entries(self, shape: Shape) -> float:
        return _kept(shape) * (2 if shape.update == "recompress" else 1)

    def held_bytes(self, shape: Shape, optimizer: str) -> tuple[float, float]:
        packed = _packed(shape)
        transposed = packed * shape.mask.transposable  # a term's transpose is packed too where that is 2:4
        if not optimizer:
            return packed, transposed + shape.pattern
        other = 1.5 if self.wgrad_choice(shape) == "exchange" else 1.0
        bools = shape.out_features * shape.term_columns if self.stock else 0.0
        copies = transposed + other * shape.pattern + bools
        return (_dense(shape), copies + packed) if shape.update == "recompress" else (packed, copies)

    def scratch_bytes(self, shape: Shape, optimizer: str) -> float:
        # A stock user makes W^T contiguous before it is compressed anew.
        turned = _dense(shape) if optimizer and self.stock and shape.mask.transposable else 0.0
        return max(turned, super().scratch_bytes(shape, optimizer))


def _kept(shape: Shape) -> float:
    return shape.out_features * shape.term_columns / 2


def _dense(shape: Shape) -> float:
    return shape.out_features * shape.term_columns * shape.itemsize


def _packed(shape: Shape) -> float:
    return _kept(shape) * (shape.itemsize + 0.25)


ROWS = tuple(
    BlockShock(*looks, "blockshock_lib.layers:BlockShockLinear", "terms", product=product, update=update)
    for *looks, product, update in (
        ("block_shock", "Block-Shock", "Block-Shock", "#D55E00", "P", "", "packed"),
        ("block_shock_recompress", "Block-Shock recompress (T1)", "T1", "#882255", "h", "", "recompress"),
        ("block_shock_torch", "Block-Shock (stock op)", "stock op", "#CC79A7", "X", "torch", "recompress"),
    )
)
