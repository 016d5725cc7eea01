"""Drafts under the budget of their model: the model's own tokens, one budget, nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ds_finepage.api import attach
from ds_finepage.errors import ConfigError, FinepageError, PlanInfeasibleError
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.profiles import load_profile
from ds_finepage.integrations.transformers import price
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.linear import PackedLinear
from ds_finepage.packing.model import pack_model
from ds_finepage.runtime.drafts import Draft, stand_in_of
from ds_finepage.runtime.handle import handle_in
from ds_finepage.runtime.ranks import Ranks
from tests.integration.families import CACHE, make_model, opposite, token_ids

pytestmark = pytest.mark.usefixtures("fresh")

NEW = 24
LAYERS = {"num_hidden_layers": 2}
SETTINGS: dict[str, Any] = {"device": "cpu", "weights_group": 16}
HAS_LOST = price.Price.has_lost


def generate(model: Any, length: int = 9, **settings: Any) -> torch.Tensor:
    return model.generate(token_ids(length), max_new_tokens=NEW, do_sample=False, **settings)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is as slow as its model stays, however the times are."""
    monkeypatch.setattr(price.Price, "has_lost", False)


@pytest.fixture
def llama() -> Any:
    return make_model("llama", **LAYERS)


class Streamer:
    """Sees the tokens of a generation, and how many passes are captured by then."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.captures: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.captures += [self.handle.stats.num_captures] * value.numel()

    def end(self) -> None:
        pass


def test_a_stand_in_drafts_from_the_weights_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price.Price, "length", lambda self: 6)  # whatever the times are
    llama = make_model("llama", num_hidden_layers=5)
    expected, before = generate(llama), dict(llama.named_parameters())
    addresses = {name: weight.data_ptr() for name, weight in before.items()}
    plain = attach(llama, device_budget="70%weights", **SETTINGS)
    generate(llama)
    start = plain.stats.reloaded_bytes
    assert torch.equal(generate(llama), expected)
    plain_bytes = plain.stats.reloaded_bytes - start
    plain.detach()

    handle = attach(llama, device_budget="70%weights", draft="stand-in", **SETTINGS)
    assert torch.equal(generate(llama), expected)
    start = handle.stats.reloaded_bytes
    with DeviceMeter(torch.device("cpu")) as meter:
        assert torch.equal(generate(llama), expected)
    stats = handle.stats
    assert stats.reloaded_bytes - start < plain_bytes * 0.4
    assert meter.peak_bytes + stats.draft_bytes <= stats.budget_bytes  # it was there before
    assert 0 < stats.num_accepted <= stats.num_drafted and stats.num_checks < 2 * NEW
    assert not stats.unplanned_reasons
    handle.detach()
    assert dict(llama.named_parameters()).keys() == before.keys()
    assert {n: w.data_ptr() for n, w in llama.named_parameters()} == addresses
    assert torch.equal(generate(llama), expected)


def test_a_draft_has_one_of_few_lengths_at_the_end_too(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(price.Price, "length", lambda self: 6)
    draft, lengths = make_model("llama", **LAYERS), []
    handle = attach(llama, device_budget="150%weights", draft=draft, **SETTINGS)
    generation = handle._calls.assistance.draft.generation
    original = generation._original

    def drafted(**given: Any) -> Any:
        lengths.append(given["max_new_tokens"])
        return original(**given)

    monkeypatch.setattr(generation, "_original", drafted)
    for num_new in range(8, 16):
        llama.generate(token_ids(9), max_new_tokens=num_new, do_sample=False)
    assert {3, 6} <= set(lengths) <= set(price.LENGTHS)


@pytest.mark.parametrize("length", [6, 0])
def test_no_pass_is_captured_after_the_first_tokens(
    llama: Any, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(price.Price, "length", lambda self: length)
    handle = attach(llama, device_budget="150%weights", draft=opposite(llama), **SETTINGS)
    seen = Streamer(handle)
    generate(llama, streamer=seen)  # the last token is made alone
    assert seen.captures[9 + 8] == seen.captures[-1]
    assert length or seen.captures[-1] == 2  # the prompt, and a step: nothing is checked
    llama.generate(token_ids(9), max_new_tokens=4, min_new_tokens=4, do_sample=True)


def test_a_stand_in_has_the_models_own_objects_and_packs_what_streams(llama: Any) -> None:
    homes = {name: weight.data_ptr() for name, weight in llama.named_parameters()}
    handle = attach(llama, device_budget="85%weights", draft="stand-in", **SETTINGS)
    draft = handle.draft
    layers = [m for m in draft.modules() if isinstance(m, PackedLinear)]
    assert layers and not any(isinstance(m, PackedLinear) for m in llama.modules())
    assert draft.model.embed_tokens is llama.model.embed_tokens
    own, drafts = dict(llama.named_parameters()), dict(draft.named_parameters())
    streamed = own.keys() - drafts.keys()
    assert any("proj" in name for name in own.keys() & drafts.keys())  # a layer that has room
    assert all(own[name].data_ptr() != homes[name] for name in own.keys() & drafts.keys())
    assert len(streamed) == len(layers)
    assert handle.stats.weight_bytes == sum(own[name].nbytes for name in streamed)
    llama(token_ids(9))  # the copies count before the draft has run
    copies = sum(drafts[name].nbytes for name in drafts.keys() - own.keys())
    assert handle._runner.table.passes[0].live_bytes >= copies


@pytest.mark.parametrize("is_named", [False, True], ids=["of the call", "of the model"])
def test_another_model_drafts_under_the_same_budget(llama: Any, is_named: bool) -> None:
    draft, expected = make_model("llama", **LAYERS), generate(llama)
    settings = {} if is_named else {"assistant_model": draft}
    handle = attach(
        llama, device_budget="150%weights", draft=draft if is_named else None, **SETTINGS
    )
    for _ in range(2):
        assert torch.equal(generate(llama, **settings), expected)
    stats = handle.stats
    assert stats.draft_bytes == sum(w.nbytes for w in draft.parameters())
    assert stats.num_accepted == stats.num_drafted > 0  # it has the same weights
    assert torch.equal(generate(llama), expected)
    assert (handle.stats.num_drafted > stats.num_drafted) is is_named
    if is_named:  # the draft can be called by itself
        assert handle._calls.assistance.draft.generation.num_plans() == handle.stats.num_plans
        assert torch.equal(draft.generate(token_ids(9), max_new_tokens=NEW), expected)
    assert min(p.min_budget_bytes for p in stats.passes) > stats.draft_bytes
    handle.take_draft(None)
    assert handle.draft is None and torch.equal(generate(llama), expected)
    assert handle.stats.draft_bytes == 0
    assert all(p.live_bytes < stats.draft_bytes for p in handle._runner.table.passes)
    handle.detach()
    assert torch.equal(generate(draft), expected)


@pytest.mark.parametrize("competes", [False, True])
def test_a_draft_that_does_not_pay_gives_its_room_back(
    llama: Any, competes: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(price.Price, "has_lost", HAS_LOST)
    ids, given = token_ids(9), {"max_new_tokens": 100, "do_sample": False}
    draft, expected = opposite(llama), llama.generate(ids, **given)
    alone = draft.generate(ids, **given)
    handle = attach(llama, device_budget="150%weights", draft=draft, **SETTINGS)
    said, seen = "the draft LlamaForCausalLM does not pay", []

    class Watcher(Streamer):
        def put(self, value: torch.Tensor) -> None:
            assistance = handle._calls.assistance
            assert assistance.use_alone.longest == 108
            assistance.use_alone = replace(assistance.use_alone, competes=competes)
            if said in caplog.text:
                last = handle._runner._last
                assert last is not None
                seen.append((handle.stats.num_drafted, last.live_bytes))

    assert torch.equal(llama.generate(ids, streamer=Watcher(handle), **given), expected)
    assert caplog.text.count(said) == 1
    assert handle.draft is None and torch.equal(draft.generate(ids, **given), alone)
    nbytes = sum(w.nbytes for w in draft.parameters())
    assert len({num_drafted for num_drafted, _ in seen}) == 1  # it has drafted no more since
    assert seen[2][1] < nbytes
    assert bool(handle.stats.num_caches_on_host) is competes  # as without a draft
    assert all(p.live_bytes < nbytes for p in handle._runner.table.passes)
    assert torch.equal(llama.generate(ids, assistant_model=draft, **given), expected)
    assert handle.draft is None and caplog.text.count(said) == 1
    handle.take_draft(Draft(draft))  # the user may try again
    assert handle.draft is draft
    assert torch.equal(llama.generate(ids, max_new_tokens=8, do_sample=False), expected[:, :17])
    assert handle.draft is draft


def test_a_sampled_token_is_one_of_the_model(llama: Any) -> None:
    """A draft that is always wrong shows whether rejected tokens are drawn again as they should."""
    ids, count = token_ids(9), 400
    with torch.no_grad():
        chances = torch.softmax(llama(ids).logits[0, -1] / 0.1, dim=-1)
    handle = attach(llama, device_budget="150%weights", draft=opposite(llama), **SETTINGS)
    sampled = torch.zeros_like(chances)
    torch.manual_seed(0)
    for _ in range(count):
        found = llama.generate(ids, max_new_tokens=2, do_sample=True, temperature=0.1, top_k=0)
        sampled[found[0, ids.shape[1]]] += 1
    handle.detach()
    assert (sampled / count - chances).abs().max() < 5 * (0.25 / count) ** 0.5


def test_an_error_in_the_draft_is_said_once_and_decoding_goes_on(
    llama: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, draft = generate(llama), make_model("llama", **LAYERS)
    attach(llama, device_budget="150%weights", draft=draft, **SETTINGS)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken draft")

    monkeypatch.setattr(draft.model, "forward", fail)
    assert torch.equal(generate(llama), expected)
    assert caplog.text.count("the model goes on without it: broken draft") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_interrupt_in_a_step_of_a_stand_in_the_cache_is_right(
    llama: Any, error: type[BaseException]
) -> None:
    expected = generate(llama)
    handle = attach(llama, device_budget="85%weights", draft="stand-in", **SETTINGS)
    assert torch.equal(generate(llama), expected)
    num_seen = 0

    def stop(task: Any, operands: Any) -> None:
        nonlocal num_seen
        if "packed_linear" in task.op:
            num_seen += 1
            if num_seen == 5:
                raise error("stop")

    remove = handle.register_op_hook(before=stop)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            generate(llama)
    else:
        assert torch.equal(generate(llama), expected)
    remove()
    assert torch.equal(generate(llama), expected)


def chat(model: Any) -> torch.Tensor:
    """Go on with the cache of a turn that was too short to draft."""
    turn = model.generate(token_ids(9, batch=2), max_new_tokens=2, return_dict_in_generate=True)
    longer = torch.cat([turn.sequences, token_ids(4, batch=2)], dim=1)[:1]
    turn[CACHE].batch_select_indices(torch.tensor([0]))
    return model.generate(longer, **{CACHE: turn[CACHE]}, max_new_tokens=4)


PLAIN_CALLS: dict[str, Callable[[Any], torch.Tensor]] = {
    "it has 2 sequences": lambda m: m.generate(token_ids(5, batch=2), max_new_tokens=4),
    "num_beams is above 1": lambda m: generate(m, num_beams=2),
    "it has no KV cache": lambda m: generate(m, use_cache=False),
    "its KV cache cannot be cropped": lambda m: generate(m, cache_implementation="static"),
    "it has prompt_lookup_num_tokens": lambda m: generate(m, prompt_lookup_num_tokens=3),
    "its prompt is no table": lambda m: m.generate(max_new_tokens=3, bos_token_id=1),
    "it goes on with a KV cache": chat,
}


def test_what_transformers_cannot_assist_runs_plainly_and_says_why(
    llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def seeded(call: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(3)
        return call(llama)

    expected = {reason: seeded(call) for reason, call in PLAIN_CALLS.items()}
    handle = attach(llama, device_budget="90%weights", draft="stand-in", **SETTINGS)
    for reason, call in PLAIN_CALLS.items():
        for _ in range(2):
            assert torch.equal(seeded(call), expected[reason]), reason
        assert caplog.text.count(f"runs without the draft: {reason}") == 1
    assert handle.stats.num_drafted == 0


def test_threads_generate_with_one_stand_in(llama: Any) -> None:
    lengths = (5, 9, 13, 17)
    expected = [generate(llama, n) for n in lengths]
    attach(llama, device_budget="90%weights", draft="stand-in", **SETTINGS)
    with ThreadPoolExecutor(len(lengths)) as pool:
        found = list(pool.map(lambda length: generate(llama, length), lengths))
    assert all(map(torch.equal, found, expected))


def test_threads_with_drafts_of_their_own_do_not_take_each_others_away(llama: Any) -> None:
    expected = generate(llama)
    attach(llama, device_budget="160%weights", **SETTINGS)

    def run(draft: Any) -> list[bool]:
        return [torch.equal(generate(llama, assistant_model=draft), expected) for _ in range(2)]

    with ThreadPoolExecutor(3) as pool:
        seen = list(pool.map(run, [make_model("llama", **LAYERS), opposite(llama), None]))
    assert seen == [[True, True]] * 3


def test_a_streamer_cannot_take_the_draft_away(llama: Any) -> None:
    handle = attach(llama, device_budget="90%weights", draft="stand-in", **SETTINGS)

    class Changer(Streamer):
        def put(self, value: torch.Tensor) -> None:
            self.handle.take_draft(None)

    with pytest.raises(FinepageError, match=r"take_draft\(\) was called while the model generates"):
        generate(llama, streamer=Changer(handle))
    handle.take_draft(None)  # the turn is over


def test_a_draft_without_room_is_refused_with_its_size_and_the_model_runs_alone(llama: Any) -> None:
    expected, draft = generate(llama), make_model("llama", **LAYERS)
    handle = attach(llama, device_budget="90%weights", **SETTINGS)
    nbytes = sum(w.nbytes for w in draft.parameters())
    with pytest.raises(PlanInfeasibleError, match=rf"the draft Llama.* takes .*\({nbytes} bytes\)"):
        generate(llama, assistant_model=draft)
    assert torch.equal(generate(llama), expected)
    handle.detach()
    with pytest.raises(PlanInfeasibleError, match="the draft Llama"):
        attach(llama, device_budget="90%weights", draft=draft, **SETTINGS)
    assert torch.equal(generate(llama), expected) and torch.equal(generate(draft), expected)


@pytest.mark.parametrize("shared", [{"has_whole_model": False}, {"collects_weights": True}])
def test_a_model_that_several_ranks_share_has_no_draft(llama: Any, shared: dict[str, bool]) -> None:
    ranks = type("SharedRanks", (Ranks,), shared)()
    with pytest.raises(ConfigError, match="draft: several ranks share the model"):
        attach(llama, device_budget="90%weights", draft="stand-in", ranks=ranks, **SETTINGS)
    assert handle_in(llama) is None and llama.lm_head.weight.numel()


def test_a_draft_that_is_loaded_in_parts_is_refused(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parted = make_model("llama", **LAYERS)
    parted.lm_head.weight = torch.nn.Parameter(torch.empty(0))
    load = staticmethod(lambda *_, **__: parted)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(ConfigError, match="'a folder' was loaded in parts"):
        attach(llama, device_budget="90%weights", draft="a folder", **SETTINGS)


@pytest.mark.parametrize("has_streamer", [False, True])
def test_a_refusal_names_the_draft_and_the_model_runs_without_it(
    llama: Any, has_streamer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(llama)
    handle = attach(llama, device_budget="85%weights", draft="stand-in", **SETTINGS)
    nbytes = handle.stats.draft_bytes
    handle.replan(budget_bytes=nbytes + 60_000)
    says = f"{nbytes} bytes of the device are the draft's"
    if has_streamer:  # which has seen the prompt
        with pytest.raises(PlanInfeasibleError, match=says):
            generate(llama, streamer=Streamer(handle))
    else:
        assert torch.equal(generate(llama), expected)
        assert says in caplog.text
    assert handle.draft is None
    assert handle.stats.weight_bytes == sum(w.nbytes for w in llama.parameters())
    assert torch.equal(generate(llama), expected)


def test_a_stand_in_without_room_or_layers_is_refused(llama: Any) -> None:
    with pytest.raises(PlanInfeasibleError, match="a stand-in takes .* leaves ") as caught:
        attach(llama, device_budget="10%weights", draft="stand-in", **SETTINGS)
    least = caught.value.min_budget_bytes
    assert least is not None and f"finepage.device_budget to >= {least}" in str(caught.value)
    form = PackedForm.parse("int4", 16)
    stand_in_of(llama, least, form)
    with pytest.raises(PlanInfeasibleError):  # it names a tenth too much at most
        stand_in_of(llama, least * 9 // 10, form)
    with pytest.raises(ConfigError, match="draft: Embedding has no layer that can be packed"):
        attach(torch.nn.Embedding(8, 64), device_budget="1MiB", draft="stand-in", device="cpu")
    pack_model(llama, PackedForm.parse("int8", 16))
    with pytest.raises(ConfigError, match="quantised already"):
        attach(llama, device_budget="90%weights", draft="stand-in", **SETTINGS)


def test_a_draft_that_is_attached_by_itself_stays_so(llama: Any) -> None:
    draft, expected = make_model("llama", **LAYERS), generate(llama)
    own = attach(draft, device_budget="90%weights", device="cpu")
    handle = attach(llama, device_budget="90%weights", **SETTINGS)
    assert torch.equal(generate(llama, assistant_model=draft), expected)
    assert handle.draft is None and own.stats.reloaded_bytes > 0


def test_a_draft_that_was_made_in_inference_mode_is_given_back(llama: Any) -> None:
    handle = attach(llama, device_budget="160%weights", **SETTINGS)
    with torch.inference_mode():
        draft, expected = make_model("llama", **LAYERS), generate(llama)
        assert torch.equal(generate(llama, assistant_model=draft), expected)
        plain = generate(make_model("llama", **LAYERS))
    homes = [home.data_ptr() for _, home in handle._calls.assistance.draft._homes]
    handle.detach()
    assert [p.data_ptr() for p in draft.parameters()] == homes
    assert torch.equal(generate(draft), plain) and torch.equal(generate(llama), expected)


def test_a_draft_that_cannot_generate_is_refused(llama: Any) -> None:
    with pytest.raises(ConfigError, match=r"draft: Linear has no generate\(\)"):
        attach(llama, device_budget="90%weights", draft=torch.nn.Linear(2, 2), **SETTINGS)
    assert not hasattr(llama, "_compiled_call_impl") or llama._compiled_call_impl is None


def test_a_draft_in_a_folder_is_loaded(llama: Any, tmp_path: Path) -> None:
    expected = generate(llama)
    make_model("llama", **LAYERS).save_pretrained(tmp_path)
    handle = attach(llama, device_budget="150%weights", draft=str(tmp_path), **SETTINGS)
    assert torch.equal(generate(llama), expected)
    assert handle.stats.num_accepted > 0
    handle.detach()
    with pytest.raises(ConfigError, match="finepage.draft: '.*nowhere' cannot be loaded"):
        attach(llama, device_budget="1MiB", draft=str(tmp_path / "nowhere"), device="cpu")


@pytest.mark.parametrize(
    ("share", "rate", "wins"), [(80, 1e6, True), (80, 1e12, False), (300, 1e6, False)]
)
def test_auto_takes_a_stand_in_where_it_is_predicted_to_win(
    caplog: pytest.LogCaptureFixture, share: int, rate: float, wins: bool
) -> None:
    llama = make_model("llama", **LAYERS, num_key_value_heads=1, max_position_embeddings=64)
    expected = generate(llama)
    profile = replace(load_profile("t4"), h2d_bytes_per_s=rate)
    budget = f"{share}%weights"
    handle = attach(llama, device_budget=budget, draft="auto", profile=profile, **SETTINGS)
    assert (handle.draft is not None) is wins
    assert ("not predicted to gain a tenth; there is no draft" in caplog.text) is not wins
    assert torch.equal(generate(llama), expected)
    assert (handle.stats.num_accepted > 0) is wins


def test_auto_takes_no_draft_for_a_packed_model(llama: Any) -> None:
    profile = replace(load_profile("t4"), h2d_bytes_per_s=1e6)
    given = {**SETTINGS, "weights": "int8", "profile": profile}
    handle = attach(llama, device_budget="80%weights", draft="auto", **given)
    assert handle.draft is None


def test_auto_takes_no_draft_for_what_has_no_config() -> None:
    handle = attach(torch.nn.Linear(4, 4), device_budget="1MiB", draft="auto", device="cpu")
    assert handle.draft is None


def test_a_draft_is_not_changed_while_the_model_runs(llama: Any) -> None:
    handle = attach(llama, device_budget="90%weights", **SETTINGS)

    def change(task: Any, operands: Any) -> None:
        handle.take_draft(None)

    remove = handle.register_op_hook(before=change)
    with pytest.raises(FinepageError, match=r"take_draft\(\) was called while the model runs"):
        generate(llama)
    remove()


@pytest.mark.parametrize(("percent", "share"), [(100, 1 / 3), (140, 1 / 3), (160, 0)])
def test_the_room_of_a_draft_has_its_price(percent: int, share: float) -> None:
    model = make_model("llama", num_hidden_layers=2)
    draft = make_model("llama", num_hidden_layers=1)  # of half the bytes and a little more
    handle = attach(model, device_budget=f"{percent}%weights", draft=draft, device="cpu")
    found = handle._calls.assistance.draft
    assert found is not None and found.generation.price.room_share == pytest.approx(share)


def test_a_draft_that_is_never_right_soon_rests() -> None:
    model = make_model("llama", num_hidden_layers=2)
    given = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(token_ids(9), **given)
    handle = attach(model, device_budget="150%weights", draft=opposite(model), device="cpu")
    assert torch.equal(model.generate(token_ids(9), **given), expected)
    start = handle.stats.num_drafted
    assert torch.equal(model.generate(token_ids(9), **given), expected)
    assert handle.stats.num_drafted - start <= 3
