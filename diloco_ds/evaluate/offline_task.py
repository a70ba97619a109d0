"""lm-eval's stock tasks on rows that come with an installed package instead of from the hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import manager as lm_eval_manager

from diloco_ds.errors import UserError

_OWN_KEYS = ("class", "stock", "package", "rows")


class OfflineTask(ConfigurableTask):
    """A stock task of lm-eval, prompt and metric untouched, whose validation rows lie in a package.

    Its YAML says `stock` (the stock YAML, relative to lm_eval/tasks), `package` and `rows` (an Arrow folder
    in the package); further keys replace those of the stock task, where the package names a column
    differently.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Reads the rows. UserError if lm-eval has no such task or the package is not installed."""
        self._rows = _package_path(config["package"], config["rows"])
        own = {key: value for key, value in config.items() if key not in _OWN_KEYS}
        splits = {"training_split": None, "validation_split": "validation", "test_split": None}
        super().__init__(config={**_stock_config(config["stock"]), **splits, **own})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Take the rows from the package; what is derived from them goes to the cache of `datasets`, not beside them."""
        files = [str(path) for path in sorted(self._rows.glob("*.arrow"))]
        self.dataset = datasets.load_dataset("arrow", data_files={"validation": files})


def _stock_config(stock: str) -> dict[str, Any]:
    path = Path(lm_eval_manager.__file__).parent / stock
    if not path.is_file():
        raise UserError(f"the installed lm-eval has no task file {stock}")
    config = lm_eval_manager.load_yaml(path, resolve_func=True)
    return {key: value for key, value in config.items() if key not in ("tag", "group", "task_list")}


def _package_path(package: str, inside: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"the rows of this task come with the package '{package}', which is not installed; "
            "launch/setup.sh installs it (launch/text-packages.txt)"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not any(path.glob("*.arrow")):
        raise UserError(f"the package '{package}' has no rows at {inside}")
    return path
