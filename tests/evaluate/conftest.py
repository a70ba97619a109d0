from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def eval_dir() -> Path:
    return Path(__file__).parents[2] / "eval"


@pytest.fixture(autouse=True, scope="session")
def _no_hub():
    """Everything here must run without a hub; nothing tries to reach one."""
    import datasets.config
    import huggingface_hub.constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield
