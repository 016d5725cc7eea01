"""Weights that stay in their file while a model is attached, since host memory has no room."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from ds_finepage.api import attach
from ds_finepage.errors import ConfigError, StoreError
from ds_finepage.execution import disk, file_weights
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.memgraph import Lane
from tests.integration.families import SLOW_LINK, logits, make_model, token_ids

NEW = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (disk, file_weights):
        monkeypatch.setattr(module, "PIECE_BYTES", 1 << 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    make_model("llama", **shape).save_pretrained(found, max_shard_size="2MB")
    return found


@pytest.fixture(params=["cpu", "accelerator"])
def where(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    found = request.getfixturevalue("device")
    assert isinstance(found, torch.device)
    return found


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def bytes_of(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters())


def attached(model: Any, where: torch.device, share: float = 0.4, **settings: Any) -> Any:
    given = {"device_budget": "60%weights", **settings}
    return attach(model, host_budget=int(share * bytes_of(model)), device=where, **given)


def masters_in_files(handle: Any) -> list[tuple[str, torch.Tensor]]:
    weights = handle._runner._weights
    return [(name, m) for name, m in weights.masters.items() if name in weights.files.sources]


def test_a_model_runs_that_host_memory_has_no_room_for(where: torch.device, folder: Path) -> None:
    ids, plain, model = token_ids(7), load(folder), load(folder)
    expected = plain.generate(ids, **NEW)
    handle = attached(model, where)
    assert handle.stats.host_bytes < handle.stats.host_budget_bytes
    for i in range(3):
        with DeviceMeter(where) as meter:
            found = model.generate(ids.to(where), **NEW)
        assert torch.equal(found.cpu(), expected)
        # On the CPU the copies in host memory, which are made in the first call, count too.
        assert meter.peak_bytes <= handle.stats.budget_bytes or (i == 0 and where.type == "cpu")
    stats = handle.stats
    assert 0 < stats.host_bytes <= stats.host_budget_bytes < stats.weight_bytes
    assert not stats.unplanned_reasons
    plan = handle._runner.table.passes[-1].memgraph
    assert plan is not None and 0 < plan.file_bytes
    files = handle._runner._weights.files
    assert files.held and files.reader._queue  # some have a copy; the next pass is read ahead
    assert not any(master.is_pinned() for name, master in masters_in_files(handle))
    before = stats.file_bytes
    model.generate(ids.to(where), **NEW)
    assert handle.stats.file_bytes - before >= 6 * plan.file_bytes
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), plain.state_dict()[name]), name
    handle.detach()
    assert not files.reader._queue and files.reader._threads is None
    assert torch.equal(logits(model, ids), logits(plain, ids))
    assert sum(each is not None for each in disk.files_of([*model.parameters()])) > 10


def test_copies_make_way_for_a_cache_in_host_memory(where: torch.device, folder: Path) -> None:
    ids, plain, model = token_ids(7), load(folder), load(folder)
    long = {"max_new_tokens": 150, "do_sample": False}
    handle = attached(model, where, kv_cache="host")
    assert torch.equal(model.generate(ids.to(where), **NEW).cpu(), plain.generate(ids, **NEW))
    before = handle._runner._weights.files.held_bytes
    found = model.generate(ids.to(where), **long)
    assert torch.equal(found.cpu(), plain.generate(ids, **long))
    assert handle._runner._weights.files.held_bytes < before
    assert handle.stats.host_bytes <= handle.stats.host_budget_bytes
    assert not handle.stats.unplanned_reasons


def test_where_all_have_room_no_file_is_read(where: torch.device, folder: Path) -> None:
    ids, model = token_ids(7), load(folder)
    expected = logits(load(folder), ids)
    handle = attached(model, where, 1.1)
    assert torch.equal(logits(model, ids.to(where)).cpu(), expected)
    assert handle.stats.file_bytes == 0
    assert handle.stats.host_bytes == handle.stats.weight_bytes


def test_all_weights_fit_the_device_and_not_host_memory(where: torch.device, folder: Path) -> None:
    ids, model = token_ids(7), load(folder)
    expected = logits(load(folder), ids)
    handle = attached(model, where, device_budget="400%weights")
    for _ in range(2):
        assert torch.equal(logits(model, ids.to(where)).cpu(), expected)
    assert handle.stats.num_resident_runs and handle.stats.file_bytes > 0


def test_a_budget_below_the_least_names_both_numbers(where: torch.device, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"lie in no file take \d+ bytes .* host_budget is 1000 "):
        attach(load(folder), device_budget="60%weights", host_budget=1000, device=where)


@pytest.mark.parametrize("how", ["in place", "by data", "by refresh"])
def test_a_weight_that_is_written_is_in_no_file_any_more(
    where: torch.device, folder: Path, how: str
) -> None:
    ids, plain, model = token_ids(7), load(folder), load(folder)
    handle = attached(model, where)
    logits(model, ids.to(where))
    for each in (plain, model):
        weight = each.model.layers[1].mlp.up_proj.weight
        with torch.no_grad():
            if how == "in place":
                weight.mul_(2.0)
            elif how == "by data":
                weight.data[0] = 1.0
            else:
                weight.detach().cpu().numpy()[0] = 1.0
        if each is model and how == "by refresh":
            handle.refresh()
    for _ in range(2):
        assert torch.equal(logits(model, ids.to(where)).cpu(), logits(plain, ids))
    assert "model.layers.1.mlp.up_proj.weight" not in handle._runner._weights.files.sources
    handle.detach()
    assert torch.equal(logits(model, ids), logits(plain, ids))


def test_a_file_that_is_cut_short_is_an_error_and_no_wrong_token(
    where: torch.device, folder: Path, tmp_path: Path
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    ids, model = token_ids(7), load(tmp_path)
    handle = attached(model, where)
    expected = logits(model, ids.to(where))
    files = {s.path for s in handle._runner._weights.files.sources.values()}
    for path in files:
        with open(path, "ab") as file:
            file.write(b"x")
    with pytest.raises(StoreError, match="is not the file that the model was loaded from"):
        logits(model, ids.to(where))
    for source in {s.path: s for s in handle._runner._weights.files.sources.values()}.values():
        os.truncate(source.path, source.identity[1])
        os.utime(source.path, ns=(source.identity[2], source.identity[2]))
    assert torch.equal(logits(model, ids.to(where)), expected)  # it is whole again


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
def test_after_an_error_or_ctrl_c_in_a_read_the_next_call_works(
    where: torch.device, folder: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, model = token_ids(7), load(folder)
    attached(model, where)
    expected = logits(model, ids.to(where))
    says = r"bytes \d+ to \d+ cannot be read: Input/output" if isinstance(error, OSError) else ""
    with monkeypatch.context() as broken:

        def fail(*given: Any) -> Any:
            raise error

        owner: Any = disk.os if says else disk.FileReader
        broken.setattr(owner, "preadv" if says else "_copy", fail)
        with pytest.raises(StoreError if says else KeyboardInterrupt, match=says or None):
            for _ in range(2):  # the first may have been read ahead
                logits(model, ids.to(where))
    for _ in range(2):
        assert torch.equal(logits(model, ids.to(where)), expected)


def test_experts_that_the_router_chose_are_read_from_the_file(
    where: torch.device, tmp_path: Path
) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    experts = {"num_local_experts": 16, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    others = {"vocab_size": 512, "num_attention_heads": 4, "max_position_embeddings": 256}
    ends = {"pad_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    made: Any = GptOssForCausalLM(GptOssConfig(**shape, **experts, **others, **ends))
    made.save_pretrained(tmp_path)
    ids, plain, model = token_ids(7), load(tmp_path), load(tmp_path)
    handle = attached(model, where, profile=SLOW_LINK)
    for _ in range(2):
        found = model.generate(ids.to(where), **NEW)
        assert torch.equal(found.cpu(), plain.generate(ids, **NEW))
    executor = handle._runner.table.passes[-1].executor
    assert any(not isinstance(r._source, torch.Tensor) for r in executor._bound.routed)


def test_two_models_read_one_checkpoint(where: torch.device, folder: Path) -> None:
    ids, models = token_ids(7), [load(folder), load(folder)]
    expected = logits(load(folder), ids)
    for model in models:
        attached(model, where)
    for _ in range(2):
        for model in models:
            assert torch.equal(logits(model, ids.to(where)).cpu(), expected)


def test_the_lane_of_the_disk_is_in_the_timeline(folder: Path) -> None:
    model, ids = load(folder), token_ids(7)
    handle = attached(model, torch.device("cpu"))
    handle.record()
    for _ in range(2):
        logits(model, ids)
    measured = handle.observed()[-1].measured
    assert Lane.DISK in {span.lane for span in measured.spans}
