"""What a folder of torch.distributed.checkpoint holds, read without unpickling anything that could act.

Its `.metadata` is a pickle. Here each class it names becomes an inert stand-in, all others are refused, and what is
left are names, sizes and places in files. Those are checked and put into torch's own classes.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo  # the reader takes no other

from blockshock_lib.errors import CheckpointError

_INERT = {
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("TensorProperties", "TensorStorageMetadata")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata")),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


class _Inert:
    """What a pickled object said of itself, without its class."""

    state: Any = None

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) in _INERT:
            return type(name, (_Inert,), {})
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise CheckpointError(f".metadata names {module}.{name}, which no tensor needs: it is not executed")


class Reader(dcp.FileSystemReader):
    """Torch's reader of `folder` with the metadata that were read safely; tensors it reads with weights_only=True."""

    def __init__(self, folder: Path, metadata: dcp.Metadata):
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> dcp.Metadata:
        return self._metadata


def read_metadata(folder: Path, sizes: dict[str, int]) -> dcp.Metadata:
    """The tensors of a checkpoint and where they lie.

    Args:
        sizes: file name -> bytes, the files that tensors may lie in.

    Raises:
        CheckpointError: it names a class that tensors do not need, holds an object that is no tensor, or does not add
            up.
    """
    try:
        said = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load().state
        tensors = {key: _tensor(key, value.state) for key, value in said["state_dict_metadata"].items()}
        places = dict(_place(index.state, info.state, sizes) for index, info in said["storage_data"].items())
    except CheckpointError:
        raise
    except Exception as error:  # whatever bytes can make an unpickler raise
        raise CheckpointError(f".metadata cannot be read: {type(error).__name__}: {error}") from error
    chunks = {(key, chunk.offsets) for key, tensor in tensors.items() for chunk in tensor.chunks}
    if {(index.fqn, index.offset) for index in places} != chunks:
        raise CheckpointError(".metadata does not say where each part of a tensor lies")
    if sum(_bytes(tensor) for tensor in tensors.values()) > sum(sizes.values()):
        raise CheckpointError(".metadata speaks of more bytes than the files have")
    return dcp.Metadata(tensors, storage_data=places)


def _bytes(tensor: dcp.TensorStorageMetadata) -> int:
    return math.prod(tensor.size) * tensor.properties.dtype.itemsize


def _size(values: Any) -> torch.Size:
    if not isinstance(values, tuple) or not all(type(value) is int and value >= 0 for value in values):
        raise CheckpointError(f".metadata gives {values!r} for a size")
    return torch.Size(values)


def _tensor(key: Any, said: Any) -> dcp.TensorStorageMetadata:
    if not said or not isinstance(key, str):
        raise CheckpointError(f"{key!r} is no tensor: such an object could hold code, and is not read")
    size = _size(said["size"])
    chunks = [
        dcp_metadata.ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
        for chunk in said["chunks"]
    ]
    # What no chunk covers would stay whatever lay in memory.
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise CheckpointError(f"the parts of {key} do not make its shape {list(size)}")
    dtype = said["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{key} has no dtype")
    return dcp.TensorStorageMetadata(dcp_metadata.TensorProperties(dtype), size, chunks)


def _place(index: Any, info: Any, sizes: dict[str, int]) -> tuple[dcp_metadata.MetadataIndex, _StorageInfo]:
    name, offset, length = info["relative_path"], info["offset"], info["length"]
    inside = name in sizes and type(offset) is type(length) is int and 0 <= offset <= offset + length <= sizes[name]
    if not inside or info.get("transform_descriptors"):
        raise CheckpointError(f".metadata places {index['fqn']} outside of the checkpoint's files")
    # The hint `index` is left out: it only speeds up a search.
    return dcp_metadata.MetadataIndex(index["fqn"], _size(index["offset"])), _StorageInfo(name, offset, length)
