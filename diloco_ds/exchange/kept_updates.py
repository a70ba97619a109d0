"""`syncer.keep_updates`: what every merge was made of, on disk, so that replay can recompute the weights.

One safetensors file a merge, ``updates/FRAGMENT-VERSION.safetensors``: per part a flat fp32 tensor
``ISLAND.UPDATE_ID``, the learner's weights, or its outer gradient if the file's metadata say so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from diloco_ds.core.events import Merge
from diloco_ds.exchange.merging import Payload
from diloco_ds.rundir import RunDir


class KeptUpdates:
    """The writing end. A full disk costs the record, not the merge: it is told once."""

    def __init__(self, run: RunDir, tell: Callable[..., None]) -> None:
        self._run, self._tell = run, tell
        self._failing = False

    def save(self, action: Merge, payloads: Sequence[Payload]) -> None:
        """Write the payloads of `action`, in the order of its parts, before they are merged."""
        path = kept_path(self._run, action)
        partial = path.with_name(f".{path.name}.partial")
        named = {
            f"{part.island}.{part.update_id}": payload
            for part, payload in zip(action.parts, payloads, strict=True)
        }
        try:
            path.parent.mkdir(exist_ok=True)
            save_file(
                {name: payload.values for name, payload in named.items()},
                partial,
                metadata={
                    name: "gradient" if payload.is_gradient else "weights" for name, payload in named.items()
                },
            )
            os.replace(partial, path)
            self._failing = False
        except Exception as error:  # safetensors reports a full disk as an error of its own
            if not self._failing:
                self._tell(
                    "warning", f"{path.name}: update not kept ({error}); replay cannot recompute this merge"
                )
            self._failing = True
            partial.unlink(missing_ok=True)


def kept_path(run: RunDir, action: Merge) -> Path:
    """Where the payloads of a merge are kept."""
    return run.root / "updates" / f"{action.fragment:04d}-{action.version:08d}.safetensors"


def load_kept(run: RunDir, action: Merge) -> list[Payload]:
    """The payloads of `action`, in the order of its parts; FileNotFoundError if they were not kept."""
    with safe_open(kept_path(run, action), framework="pt") as file:
        kinds = file.metadata() or {}
        names = [f"{part.island}.{part.update_id}" for part in action.parts]
        return [Payload(file.get_tensor(name), kinds.get(name) == "gradient") for name in names]
