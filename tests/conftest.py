"""Fixtures that several test files share: a small embedded world on disk, a small base config, a small base."""

import json
from pathlib import Path

import pytest
import torch
from small import CONFIG, small_model

from rtcwm.data.make import write_world
from rtcwm.model.attention import install, resolve


@pytest.fixture(scope="session")
def clips_root(tmp_path_factory) -> Path:
    """Six clips of three episodes, eight chunks each, 96 x 64 pixels."""
    root = tmp_path_factory.mktemp("world") / "clips"
    write_world(root, clips=6, chunks=8, seed=1, height=64, width=96, episodes=3, processes=1)
    return root


@pytest.fixture(scope="session")
def base_config(tmp_path_factory) -> Path:
    """Config of a base of two narrow blocks that takes the embedded world's text."""
    path = tmp_path_factory.mktemp("base") / "small_base.json"
    path.write_text(json.dumps(CONFIG | {"text_dim": 64}))
    return path


@pytest.fixture(scope="module")
def model():
    """A small base with rtcwm's own attention and blocks, on the CPU's kernel."""
    model = small_model()
    install(model, resolve("sdpa", "cpu"))
    return model


@pytest.fixture(scope="module")
def one_thread():
    """Forked children of a process with a busy thread pool would hang; and results must not depend on it anyway."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
