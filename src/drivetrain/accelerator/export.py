"""Writing a model's weights to one safetensors file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from stat import S_IMODE

from safetensors.torch import save_file
from torch import Tensor

WEIGHTS_FILE = "model.safetensors"


def write_weights(state: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> Path:
    """Write tensors to `model.safetensors` in a folder, completely or not at all.

    A tensor that several names share is stored once, under the first of them; the others stand in the metadata.

    Returns:
        The file.
    """
    target = Path(folder) / WEIGHTS_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    metadata = {"format": "pt"}
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        first = kept.setdefault(place, name) if tensor.numel() else name
        if first == name:
            # Two views of one storage that are not the same tensor are stored apart.
            storage = tensor.untyped_storage().data_ptr()
            tensors[name] = tensor.clone() if storage in storages else tensor.contiguous()
            storages.add(storage)
        else:
            metadata[name] = first
    partial = target.with_name(f".{WEIGHTS_FILE}.{os.getpid()}")
    try:
        # safetensors gives its file to the owner alone; this one is for whoever the umask lets read.
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata=metadata)
        partial.chmod(S_IMODE(mode))
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target
