"""Cost graphs like those of models, each with the placement that an expert would choose."""

from __future__ import annotations

from dataclasses import dataclass, field

from trireme.graph.place.costs import Constraints, CostGraph, Operation

MB = 1_000_000


@dataclass
class Model:
    """Operations as they are added, and the expert's device of each, by number."""

    operations: list[Operation] = field(default_factory=list)
    expert: dict[str, int] = field(default_factory=dict)
    together: list[tuple[str, ...]] = field(default_factory=list)

    def add(
        self,
        name: str,
        *inputs: str,
        on: int,
        ms: float = 1.0,
        mb: float = 1.0,
        weights: float = 0.0,
        data: bool = False,
    ) -> str:
        """Adds an operation: milliseconds forward, megabytes of its value and its parameters."""
        self.operations.append(
            Operation(
                name,
                inputs,
                forward_seconds=ms * 1e-3,
                backward_seconds=0.0 if data else 2e-3 * ms,
                resident_bytes=int(4 * weights * MB),
                activation_bytes=int(mb * MB),
                output_bytes=int(mb * MB),
                differentiable=not data,
            )
        )
        self.expert[name] = on
        return name

    @property
    def graph(self) -> CostGraph:
        return CostGraph(tuple(self.operations))

    @property
    def constraints(self) -> Constraints:
        return Constraints(together=tuple(self.together))

    def expert_on(self, names: list[str]) -> dict[str, str]:
        """The expert's placement on devices of these names."""
        return {name: names[number % len(names)] for name, number in self.expert.items()}


def inception(blocks: int = 6) -> Model:
    """Blocks of four branches between concatenations; the expert splits branches."""
    model = Model()
    last = model.add("images", on=0, ms=0.01, mb=2, data=True)
    last = model.add("stem", last, on=0, ms=4, mb=1, weights=1)
    for block in range(blocks):
        ends = []
        for branch, (length, ms) in enumerate(((1, 2.0), (2, 3.0), (3, 3.0), (2, 1.0))):
            here, value = (0, 1, 0, 1)[branch], last
            if branch == 2:
                here = 0
            elif branch == 1:
                here = 1
            for step in range(length):
                name = f"b{block}.{branch}.{step}"
                value = model.add(name, value, on=here, ms=ms, mb=0.25, weights=0.5)
                value = model.add(f"{name}.relu", value, on=here, ms=0.05, mb=0.25)
            ends.append(value)
        last = model.add(f"b{block}.cat", *ends, on=0, ms=0.1, mb=1)
    model.add("loss", last, on=0, ms=0.5, mb=0.001, weights=1)
    return model


def u_net(depth: int = 5) -> Model:
    """An encoder, a decoder and skips between them; the expert cuts each level pair to a device."""
    model = Model()
    last = model.add("images", on=0, ms=0.01, mb=4, data=True)
    skips = []
    for level in range(depth):
        here, size = min(level // 2, 3), 8 / 2**level
        for step in range(2):
            last = model.add(f"down{level}.{step}", last, on=here, ms=4, mb=size, weights=1)
        skips.append(last)
        last = model.add(f"pool{level}", last, on=here, ms=0.2, mb=size / 4)
    last = model.add("bottom", last, on=min(depth // 2, 3), ms=6, mb=0.1, weights=8)
    for level in reversed(range(depth)):
        here, size = min(level // 2, 3), 8 / 2**level
        last = model.add(f"up{level}", last, on=here, ms=1, mb=size)
        last = model.add(f"cat{level}", last, skips[level], on=here, ms=0.2, mb=2 * size)
        for step in range(2):
            last = model.add(f"conv{level}.{step}", last, on=here, ms=4, mb=size, weights=1)
    model.add("loss", last, on=0, ms=0.2, mb=0.001)
    return model


def two_tower(layers: int = 8) -> Model:
    """Two towers that meet at the end; the expert gives each its device."""
    model = Model()
    ends = []
    for tower, ms in (("user", 3.0), ("item", 3.5)):
        here = int(tower == "item")
        last = model.add(f"{tower}.ids", on=here, ms=0.01, mb=0.01, data=True)
        last = model.add(f"{tower}.embed", last, on=here, ms=1, mb=1, weights=50)
        for layer in range(layers):
            last = model.add(f"{tower}.{layer}", last, on=here, ms=ms, mb=0.5, weights=2)
            last = model.add(f"{tower}.{layer}.relu", last, on=here, ms=0.1, mb=0.5)
        ends.append(last)
    model.add("score", *ends, on=0, ms=0.2, mb=0.01)
    return model


def lstm(layers: int = 2, steps: int = 12) -> Model:
    """An unrolled encoder and decoder; each layer's cells share parameters, and have a device."""
    model = Model()
    state: dict[str, str] = {}
    for number, side in enumerate(("encoder", "decoder")):
        for layer in range(layers):
            model.together.append(tuple(f"{side}.{layer}.{step}" for step in range(steps)))
        for step in range(steps):
            value = model.add(f"{side}.in{step}", on=number * layers, ms=0.05, mb=0.05, data=True)
            for layer in range(layers):
                own, first = f"{side}.{layer}", step == 0
                inputs = [value] + [state[key] for key in (own,) if key in state]
                if first and side == "decoder":
                    inputs.append(state[f"encoder.{layer}"])
                weights = 8.0 if first else 0.0
                here = number * layers + layer
                value = model.add(f"{own}.{step}", *inputs, on=here, ms=2, mb=0.1, weights=weights)
                state[own] = value
            if side == "decoder":
                model.add(f"out{step}", value, on=number * layers + 1, ms=1, mb=0.1)
    model.together.append(tuple(f"out{step}" for step in range(steps)))
    model.add("loss", *(f"out{step}" for step in range(steps)), on=3, ms=0.1, mb=0.001)
    return model


def mixture(blocks: int = 4, experts: int = 8) -> Model:
    """Blocks of attention and parallel experts; two experts of each block on a device."""
    model = Model()
    last = model.add("tokens", on=0, ms=0.01, mb=0.1, data=True)
    last = model.add("embed", last, on=0, ms=0.5, mb=1, weights=10)
    for block in range(blocks):
        last = model.add(f"{block}.attention", last, on=0, ms=2, mb=1, weights=2)
        gate = model.add(f"{block}.gate", last, on=0, ms=0.1, mb=1)
        ends = [
            model.add(f"{block}.expert{each}", gate, on=each % 4, ms=3, mb=0.25, weights=8)
            for each in range(experts)
        ]
        last = model.add(f"{block}.combine", last, *ends, on=0, ms=0.2, mb=1)
    model.add("loss", last, on=0, ms=0.3, mb=0.001)
    return model


MODELS = {
    "inception": inception,
    "u-net": u_net,
    "two-tower": two_tower,
    "lstm": lstm,
    "mixture": mixture,
}
