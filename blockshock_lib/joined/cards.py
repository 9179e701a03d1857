"""The machine card of several machines, and what must be the same on all of them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from blockshock_lib import machine
from blockshock_lib.engine.power import visible_devices
from blockshock_lib.errors import ParamsError
from blockshock_lib.joined.environment import Place


def hello(place: Place) -> dict[str, Any]:
    """What a supervisor tells the others of its machine: node, card, code, and which GPU its rank takes.

    `gpu` is that GPU's index here: the rank's own number on the machine, or 0 where the launcher lets each rank see its
    own GPU only. `uuid` tells the GPU from all others; it is compared and never stored.
    """
    card = machine.probe()
    gpu = place.local if place.local < len(card["gpus"]) else 0
    code = machine.code_version()["sources"]
    return {"node": place.node, "card": card, "code": code, "gpu": gpu, "uuid": _uuid(gpu) if card["gpus"] else ""}


def joined(hellos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One card for all ranks, shaped as `machine.probe` gives it; `hellos` in rank order.

    On one machine it is that machine's. On more, `gpus` has one entry a rank, each with its node; title and cpu say how
    many nodes there are, so the fingerprint is another one than a single node's.

    Raises:
        ParamsError: the ranks run different code or libraries, some have a GPU and some have none, or two would share
            one.
    """
    first = hellos[0]
    for rank, one in enumerate(hellos):
        if one["code"] != first["code"]:
            raise ParamsError(f"rank {rank} runs other code than rank 0: bring all machines to the same files")
        for name, version in first["card"]["libraries"].items():
            if (other := one["card"]["libraries"].get(name, "")) != version:
                raise ParamsError(f"rank {rank} has {name} {other or 'missing'}, rank 0 has {version or 'none'}")
        if bool(one["card"]["gpus"]) != bool(first["card"]["gpus"]):
            raise ParamsError(f"rank {rank if first['card']['gpus'] else 0} has no GPU, and another rank has one")
    uuids = [one["uuid"] for one in hellos]
    for rank, uuid in enumerate(uuids):
        if uuid and (before := uuids.index(uuid)) != rank:
            raise ParamsError(f"ranks {before} and {rank} would share one GPU: start one rank a GPU")

    nodes = [[one for one in hellos if one["node"] == node] for node in dict.fromkeys(one["node"] for one in hellos)]
    if len(nodes) == 1 and (not first["uuid"] or len(first["card"]["gpus"]) >= len(hellos)):
        return first["card"]
    gpus = [one["card"]["gpus"][one["gpu"]] | {"index": rank} for rank, one in enumerate(hellos) if one["uuid"]]
    number = {one["node"]: k for k, (one, *_) in enumerate(nodes)}
    unsupported: dict[str, str] = {}
    for one in hellos:
        unsupported |= one["card"]["unsupported"]
    return first["card"] | {
        "title": " + ".join(_counted(Counter(map(_title, nodes)))),
        "gpus": [gpu | {"node": number[one["node"]]} for gpu, one in zip(gpus, hellos, strict=False)],
        "links": [link | {"node": k} for k, node in enumerate(nodes) for link in node[0]["card"]["links"]],
        "cpu": first["card"]["cpu"] | {"nodes": len(nodes)},
        "unsupported": unsupported,
    }


def _counted(titles: Counter) -> list[str]:
    if len(titles) == 1 and titles.total() == 1:
        return list(titles)
    return [f"{count} node{'s' if count > 1 else ''} of {title}" for title, count in titles.items()]


def _title(node: list[dict[str, Any]]) -> str:
    # The GPUs that the ranks take, not all that the machine has.
    names = Counter(one["card"]["gpus"][one["gpu"]]["name"] for one in node if one["uuid"])
    return " + ".join(f"{count}x {name}" for name, count in names.items()) or node[0]["card"]["title"]


def _uuid(gpu: int) -> str:
    import pynvml

    (name,) = visible_devices(gpu + 1)[gpu:]
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            if name.isdigit():
                name = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(name)))
        finally:
            pynvml.nvmlShutdown()
    return str(name)
