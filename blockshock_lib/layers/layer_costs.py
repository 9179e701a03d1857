"""What one rank of a method must at least do and hold: what every method says of itself, and what follows from it."""

from __future__ import annotations

from blockshock_lib.layers.costs import MOMENTS, Cost, Holding, Shape


class LayerCosts:
    """Mixed into a layer, which says `cost`, `cost_dx` and `cost_dw`, and its strategy `dw_by`."""

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        """Of the forward."""
        raise NotImplementedError(f"{cls.__name__} must say what it costs")

    @classmethod
    def cost_dx(cls, shape: Shape) -> Cost:
        """Of dX, with its collective."""
        raise NotImplementedError(f"{cls.__name__} must say what dX costs")

    @classmethod
    def cost_dw(cls, shape: Shape, by: str = "full") -> Cost:
        """Of dW by a strategy."""
        raise NotImplementedError(f"{cls.__name__} must say what dW costs")

    @classmethod
    def cost_stages(cls, shape: Shape) -> dict[str, Cost]:
        """Of what must follow an optimizer's step; the keys of `stages`."""
        return {}

    @classmethod
    def cost_compress(cls, shape: Shape) -> Cost | None:
        """Of packing the weight for the forward and for dX; None where it is not packed."""
        return None

    @classmethod
    def entries(cls, shape: Shape) -> float:
        """Entries of the parameter `weight` of one rank, those kept at zero included."""
        return cls.cost(shape).weights / shape.itemsize

    @classmethod
    def training_bytes(cls, shape: Shape, optimizer: str) -> Holding:
        """Bytes held in a step with `optimizer`: "sgd", "adamw", or "" for a forward and dX of frozen weights."""
        trained = cls.entries(shape) * shape.itemsize if optimizer else 0.0
        return Holding(
            weights=cls.stored_bytes(shape, optimizer),
            copies=cls.copies_bytes(shape, optimizer),
            gradients=trained,
            optimizer=MOMENTS[optimizer] * trained,
            activations=2 * shape.y + shape.x,
            scratch=cls.scratch_bytes(shape, optimizer),
        )

    @classmethod
    def scratch_bytes(cls, shape: Shape, optimizer: str) -> float:
        """Bytes of the largest temporary of any one piece of a step, beyond what that piece finds: in the forward there
        is neither dX nor a gradient yet.
        """
        trained = cls.entries(shape) * shape.itemsize if optimizer else 0.0
        forward, dx, dw = cls.cost(shape), cls.cost_dx(shape), cls.cost_dw(shape, cls.dw_choice(shape))
        scratch = [forward.peak - forward.weights - shape.y - shape.x - trained, dx.peak - dx.weights - shape.x, 0.0]
        return max(scratch + [dw.peak - trained] * bool(optimizer))

    @classmethod
    def dw_choice(cls, shape: Shape) -> str:
        """The strategy for dW that a layer of this shape takes by itself."""
        return cls.dw_by

    @classmethod
    def stored_bytes(cls, shape: Shape, optimizer: str) -> float:
        """Bytes of the parameter's own storage, in a step with `optimizer`."""
        return cls.cost(shape).weights

    @classmethod
    def copies_bytes(cls, shape: Shape, optimizer: str) -> float:
        """Bytes of packed copies and the pattern of the mask beside it, in a step with `optimizer`."""
        return 0.0
