"""LEEWAY_TEST_DEVICE=cuda makes the tests' tensors there: losses, gradients and metrics must be the same."""
import os
import socket

import pytest
import torch

DEVICE = os.environ.get("LEEWAY_TEST_DEVICE", "cpu")
torch.set_default_device(DEVICE)


@pytest.fixture
def unused_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
