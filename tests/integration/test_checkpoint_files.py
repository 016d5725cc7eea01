"""Tensors whose bytes are in a file, held against those that are in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from ds_finepage.errors import StoreError
from ds_finepage.integrations.deepspeed import checkpoint_files, loading
from ds_finepage.integrations.deepspeed.checkpoint_files import open_file

Tensors = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Path]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the larger tensor into pieces, the last of which is shorter."""
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 6000)


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    """What was saved, what is found, and the file."""
    expected = {
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.float16),
        "matrix": torch.randn(64, 50),
        "scalar": torch.tensor(3),
    }
    path = tmp_path / "x.safetensors"
    save_file(expected, path)
    found = open_file(path)
    assert found is not None
    return expected, found, path


def test_tensors_of_a_file_compute_as_others(tensors: Tensors) -> None:
    expected, found, _ = tensors
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
        assert found[name].device.type == "cpu" and isinstance(found[name], torch.Tensor)
        assert torch.equal(torch.empty_like(tensor).copy_(found[name]), tensor)
        assert torch.equal(found[name].clone(), tensor)
    matrix, lazy = expected["matrix"], found["matrix"]
    assert torch.equal(torch.stack([lazy, lazy]), torch.stack([matrix, matrix]))
    assert torch.equal(lazy.T.contiguous(), matrix.T) and type(lazy[0]) is torch.Tensor
    assert torch.equal(torch.empty(50, 64).T.copy_(lazy), matrix)  # not one piece of memory
    assert torch.equal(torch.empty(2, 64, 50).copy_(lazy)[1], matrix)  # more than one
    target = torch.empty(64, 50, dtype=torch.bfloat16)
    assert torch.equal(target.copy_(lazy), matrix.to(torch.bfloat16))


def test_a_change_of_a_tensor_of_a_file_lasts(tensors: Tensors) -> None:
    expected, found, path = tensors
    found["matrix"].mul_(2)
    assert torch.equal(found["matrix"].clone(), expected["matrix"] * 2)
    assert torch.equal(torch.empty(64, 50).copy_(found["matrix"]), expected["matrix"] * 2)
    assert torch.equal(load_file(path)["matrix"], expected["matrix"])


def test_a_file_that_became_shorter_is_refused(tensors: Tensors) -> None:
    _, found, path = tensors
    path.write_bytes(path.read_bytes()[:-7000])
    with pytest.raises(StoreError, match="x.safetensors ends within matrix: .* load it again"):
        found["matrix"].clone()


def test_a_dtype_without_a_counterpart_is_left_to_stock(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex64)}, path)
    assert open_file(path) is None
    found = loading._read_file(modeling_utils.load_state_dict, path)
    assert {type(tensor) for tensor in found.values()} == {torch.Tensor}
