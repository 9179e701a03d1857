"""What Block-Shock must at least do and hold on one rank, for each variant and each strategy for dW.

With k = 2 K / w input columns a rank and e bytes an element:
- a packed term has N k / 2 values and 2 bits of metadata for each: N k / 2 (e + 1/4) bytes, 9/16 of dense in 16 bit;
- its pattern is held for training: nothing for a mask that repeats one tile, else one entry a 4x4 tile, 1 byte where
  the mask is transposable and 2 where it is not; with `exchange` half as much again, for half of the other term's rows.
"""

from __future__ import annotations

from blockshock_lib.layers.costs import Cost, Shape, dense_dw, summed, summed_dx


class BlockShockCosts:
    """Mixed into the layer: see `ShardedLinear` for what each number says."""

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        k = shape.term_columns
        # The 2:4 ops read x as contiguous: from four ranks on, where a rank reads only its columns, they are copied.
        copied = shape.batch * k * shape.itemsize if shape.world_size > 2 else 0
        return summed(shape, 2.0 * shape.batch * _kept(shape), _packed(shape), k, copied)

    @classmethod
    def cost_dx(cls, shape: Shape) -> Cost:
        k, dense = shape.term_columns, _dense(shape)
        if shape.mask.transposable:
            return summed_dx(shape, 2.0 * shape.batch * _kept(shape), _packed(shape), k)
        cost = summed_dx(shape, 4.0 * shape.batch * _kept(shape), dense, k)
        if shape.update == "recompress":
            return cost
        # The dense masked weight is written from the packed values, then read.
        values = _kept(shape) * shape.itemsize
        return cost._replace(
            read=cost.read + values,
            written=cost.written + dense,
            weights=_packed(shape),
            peak=cost.peak + _packed(shape),
        )

    @classmethod
    def cost_dw(cls, shape: Shape, by: str = "full") -> Cost:
        """Of the gradient in the weight's layout: packed values, or for `recompress` a dense masked matrix."""
        n, k, kept, dense = shape.out_features, shape.term_columns, _kept(shape) * shape.itemsize, _dense(shape)
        x = shape.batch * k * shape.itemsize
        if by == "periodic":
            # x is gathered for one class at a time, and dy laid out by residue where there are several classes.
            gathered = x / 2 + (0 if shape.mask.family == "uniform" else shape.y)
            cost = dense_dw(shape, n, k / 2)._replace(read=shape.y + x, peak=kept + gathered)
        elif by == "exchange":
            half = dense_dw(shape, n / 2, k)
            cost = half._replace(
                read=half.read + dense / 2, written=dense / 2 + kept, sent=kept / 2, peak=dense / 2 + kept * 3 / 2
            )
        else:
            full = dense_dw(shape, n, k)
            if shape.stock:
                return full._replace(read=full.read + dense + n * k, written=2 * dense, peak=2 * dense)
            if shape.update == "recompress":
                return full._replace(read=full.read + dense, written=2 * dense)
            cost = full._replace(read=full.read + dense, written=dense + kept, peak=dense + kept)
        if shape.update == "packed":
            return cost
        return cost._replace(read=cost.read + kept, written=cost.written + dense, peak=max(cost.peak, dense + kept))

    @classmethod
    def cost_stages(cls, shape: Shape) -> dict[str, Cost]:
        kept, dense = _kept(shape) * shape.itemsize, _dense(shape)
        copies = 2 if shape.mask.transposable else 1
        if shape.update == "recompress":
            return {
                "remask": Cost(0.0, dense, dense, 0.0, dense, dense),
                "compress": Cost(0.0, dense, copies * kept, 0.0, dense, dense),
            }
        return {"refresh": Cost(0.0, kept, kept, 0.0, kept, kept)} if shape.mask.transposable else {}

    @classmethod
    def cost_compress(cls, shape: Shape) -> Cost:
        """Reads the dense weight once; writes values and metadata, of the transpose too where that is 2:4."""
        packed = _packed(shape) * (2 if shape.mask.transposable else 1)
        return Cost(0.0, _dense(shape), packed, 0.0, packed, _dense(shape) + packed)

    @classmethod
    def entries(cls, shape: Shape) -> float:
        return _kept(shape) * (2 if shape.update == "recompress" else 1)

    @classmethod
    def stored_bytes(cls, shape: Shape, optimizer: str) -> float:
        return _dense(shape) if optimizer and shape.update == "recompress" else _packed(shape)

    @classmethod
    def copies_bytes(cls, shape: Shape, optimizer: str) -> float:
        transposed = _packed(shape) if shape.mask.transposable else 0.0
        if not optimizer:
            return transposed + (0.0 if shape.mask.transposable else _pattern(shape))
        forward = _packed(shape) if shape.update == "recompress" else 0.0
        other = 1.5 if cls.dw_choice(shape) == "exchange" else 1.0
        bools = shape.out_features * shape.term_columns if shape.stock else 0.0
        return transposed + forward + other * _pattern(shape) + bools

    @classmethod
    def scratch_bytes(cls, shape: Shape, optimizer: str) -> float:
        # A stock user makes W^T contiguous before it is compressed anew.
        turned = _dense(shape) if optimizer and shape.stock and shape.mask.transposable else 0.0
        return max(turned, super().scratch_bytes(shape, optimizer))

    @classmethod
    def dw_choice(cls, shape: Shape) -> str:
        if shape.dw != "auto":
            return shape.dw
        if shape.stock:
            return "full"
        return "periodic" if shape.mask.periodic else "exchange"


def _kept(shape: Shape) -> float:
    return shape.out_features * shape.term_columns / 2


def _dense(shape: Shape) -> float:
    return shape.out_features * shape.term_columns * shape.itemsize


def _packed(shape: Shape) -> float:
    return _kept(shape) * (shape.itemsize + 0.25)


def _pattern(shape: Shape) -> float:
    if shape.mask.periodic:
        return 0.0
    return shape.out_features * shape.term_columns / (16 if shape.mask.transposable else 8)
