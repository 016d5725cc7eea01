from __future__ import annotations

import logging
from fractions import Fraction
from types import MappingProxyType
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_finepage.config import (
    BudgetKind,
    DebugConfig,
    DeviceBudget,
    FinepageConfig,
    HostBudget,
    PackedName,
    did_you_mean,
    nearest,
    section_of,
)
from ds_finepage.errors import ConfigError
from ds_finepage.graph.packed import PACKED_FORMS
from ds_finepage.units import GIB

POLICIES = ("finepage", "horizon")


def read(section: object) -> FinepageConfig:
    return FinepageConfig.from_dict(section, policies=POLICIES)


def resolve(value: object, **given: int) -> int:
    sizes = {"weight_bytes": 1000, "device_bytes": 4000, "free_bytes": 3000, "margin_bytes": 500}
    return DeviceBudget.parse(value).resolve(**{**sizes, **given})


# --- host_budget -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", 700 + 50),
        (" AUTO ", 700 + 50),
        (123, 123),
        ("2KiB", 2048),
        ("80%host", 1280),
        ("12.5%host", 200),
        ("100%host", 1600),
    ],
)
def test_a_host_budget_is_bytes_or_a_share_or_what_is_free(value: object, expected: int) -> None:
    budget = HostBudget.parse(value)
    assert HostBudget.parse(budget) is budget
    assert budget.resolve(held_bytes=700, free_bytes=100, all_bytes=1600) == expected
    assert HostBudget().resolve(held_bytes=700, free_bytes=40, all_bytes=1600) == 700


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("80%",), r'ambiguous: percent of what\. Write "80%host"\.'),
        (("80%device",), r"percent of 'device' is unknown\. Write \"80%host\"\."),
        (("101%host",), r'101% of the host, which has 100%\. Write at most "100%host"'),
        (("0%host", "-5%host"), r'leaves no memory\. Write "auto", "80%host"'),
        (("%host", "40%%host"), r'cannot read .*Write "auto", "80%host"'),
        (("atuo",), r"Did you mean 'auto'\? Write \"auto\", \"80%host\""),
        ((None, True, 1.5, []), r'is not a budget\. Write "auto", "80%host"'),
        ((0, "lots"), r"Write bytes as a whole number"),
    ],
)
def test_another_host_budget_is_refused(values: tuple[object, ...], message: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^finepage\.host_budget: .*{message}"):
            read({"host_budget": value})


# --- device_budget ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (1234, 1234),
        ("1234", 1234),
        ("2KiB", 2048),
        ("4kB", 4000),
        ("80%device", 3200),
        ("100%device", 4000),
        ("80 % Device", 3200),
        ("40%weights", 400),
        ("150%weights", 1500),
        ("12.5%weights", 125),
        ("12.59%weights", 125),  # rounded down
        ("auto", 2500),
        (" Auto ", 2500),
    ],
)
def test_every_form_of_a_budget_resolves(value: object, num_bytes: int) -> None:
    assert resolve(value) == num_bytes


def test_shares_are_exact_at_any_size() -> None:
    # As a float, 0.1% of this is off by thousands of bytes.
    weight_bytes = 10**24 + 7000
    assert (
        resolve("0.1%weights", weight_bytes=weight_bytes, device_bytes=10**25)
        == weight_bytes // 1000
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("40%", "40 %"), 'ambiguous.*"40%device" or "40%weights"'),
        (("12.5%",), 'ambiguous.*"12.5%device" or "12.5%weights"'),
        (("40%gpu",), "percent of 'gpu' is unknown.*40%device.*40%weights"),
        (("120%device",), "120% of the device, which has 100%"),
        (("0%device", "0.0%weights", "-5%device", "-1%weights"), "leaves no memory"),
        ((0, -1, "0", "0GiB", "-6GiB"), "less than 1 byte"),
        (
            ("", "lots", "6G", "1e9", "%device", "40%%device", "1.%weights"),
            r"finepage\.device_budget: cannot read .*6GiB",
        ),
        (
            (True, False, None, 0.4, 6e9, [], {}),
            r'is not a budget.*"auto", "80%device", "40%weights"',
        ),
        (("atuo",), "Did you mean 'auto'"),
    ],
)
def test_what_is_no_budget_is_refused(values: tuple[object, ...], message: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=message):
            DeviceBudget.parse(value)


def test_the_error_names_the_setting_it_was_given() -> None:
    with pytest.raises(ConfigError, match="^--device-budget: "):
        DeviceBudget.parse("40%", name="--device-budget")


@pytest.mark.parametrize("value", [4001, "4KiB", "401%weights"])
def test_a_budget_above_the_device_names_both_numbers(value: object) -> None:
    with pytest.raises(ConfigError, match=r"\(40\d\d bytes\); the device has .*\(4000 bytes\)"):
        resolve(value)


@pytest.mark.parametrize("margin_bytes", [3000, 9999])
def test_auto_without_free_memory_names_both_numbers(margin_bytes: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"\(3000 bytes\) free.*margin.*\({margin_bytes} bytes\)"
    ):
        resolve("auto", margin_bytes=margin_bytes)


def test_a_share_that_rounds_to_nothing_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'0\.05%weights' of .*\(1000 bytes\) is less than 1 byte"
    ):
        resolve("0.05%weights")


@given(
    st.one_of(
        st.just("auto"),
        st.integers(1, 2**50),
        st.builds(
            lambda percent, base: f"{percent}%{base}",
            st.decimals("0.000001", "100", places=6).map(lambda d: f"{d:f}"),
            st.sampled_from(["device", "weights", "host"]),
        ),
    )
)
def test_a_budget_prints_as_it_is_read(value: str | int) -> None:
    kind = HostBudget if str(value).endswith("host") else DeviceBudget
    budget = kind.parse(value)
    assert kind.parse(str(budget)) == budget
    assert kind.parse(budget) is budget


def test_budgets_of_the_same_size_print_alike() -> None:
    assert str(DeviceBudget.parse("6GiB")) == str(DeviceBudget.parse("6144MiB")) == str(6 * GIB)


def test_a_percentage_is_kept_exactly() -> None:
    budget = DeviceBudget.parse("12.5%weights")
    assert (budget.kind, budget.amount) == (BudgetKind.WEIGHTS, Fraction(1, 8))
    assert not budget.is_auto
    assert str(budget) == "12.5%weights"


# --- debug -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "debug"),
    [
        (False, DebugConfig()),
        ({}, DebugConfig()),
        (True, DebugConfig(poison_vacated=True, lane_delay_seed=0)),
        ({"poison_vacated": True}, DebugConfig(poison_vacated=True)),
        (MappingProxyType({"poison_vacated": True}), DebugConfig(poison_vacated=True)),
        ({"lane_delay_seed": None}, DebugConfig()),
        (
            {"lane_delay_seed": 7, "max_lane_delay_us": 50},
            DebugConfig(lane_delay_seed=7, max_lane_delay_us=50),
        ),
    ],
)
def test_debug_takes_a_switch_or_an_object(value: object, debug: DebugConfig) -> None:
    assert read({"debug": value}).debug == debug
    assert read({"debug": debug}).debug is debug


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", "neither true nor false nor an object"),
        (1, "neither true nor false nor an object"),
        (None, "neither true nor false nor an object"),
        ({"poison": True}, "unknown key 'poison'.*Did you mean 'poison_vacated'"),
        ({3: True}, r"^finepage\.debug: unknown key 3\. Known: poison_vacated, lane_delay_seed"),
        ({"poison_vacated": 1}, r"finepage\.debug\.poison_vacated: 1 is not a truth value"),
        ({"lane_delay_seed": True}, r"finepage\.debug\.lane_delay_seed: True is not a whole"),
        ({"lane_delay_seed": 1.5}, "not a whole number"),
        ({"lane_delay_seed": 1, "max_lane_delay_us": "9"}, "max_lane_delay_us: '9' is not a whole"),
        ({"lane_delay_seed": 1, "max_lane_delay_us": -1}, "-1 is negative"),
    ],
)
def test_bad_debug_settings_are_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({"debug": value})


def test_a_delay_without_a_seed_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read({"debug": {"max_lane_delay_us": 50}})
    assert "max_lane_delay_us has no effect" in caplog.text


# --- the section -----------------------------------------------------------------------------


def test_no_section_is_stock() -> None:
    config = FinepageConfig.from_dict(section_of({}), policies=POLICIES)
    assert config == FinepageConfig() == read({})
    assert config.enabled is False
    assert config.device_budget.is_auto
    assert config.policy == "finepage"
    assert config.debug == DebugConfig()
    assert config.kv_cache == "auto"
    assert config.weights is None and config.weights_group == 64
    assert config.fused_unpacking is False
    assert config.device_graphs is False


def test_a_whole_section_is_read() -> None:
    section = {
        "enabled": True,
        "device_budget": "6GiB",
        "policy": "horizon",
        "debug": True,
        "report": "results",
        "weights": "int4",
        "weights_group": 32,
        "fused_unpacking": True,
        "device_graphs": True,
        "kv_cache": "host",
    }
    assert FinepageConfig.from_dict(section, policies=POLICIES) == FinepageConfig(
        enabled=True,
        device_budget=DeviceBudget(kind=BudgetKind.BYTES, amount=Fraction(6 * GIB)),
        policy="horizon",
        debug=DebugConfig(poison_vacated=True, lane_delay_seed=0),
        report="results",
        weights="int4",
        weights_group=32,
        fused_unpacking=True,
        device_graphs=True,
        kv_cache="host",
    )


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read({}).enabled = True  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        read({}).debug.poison_vacated = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "meant"),
    [("enable", "enabled"), ("device_budjet", "device_budget"), ("polciy", "policy")],
)
def test_a_misspelt_key_is_refused(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'. Did you mean '{meant}'?") as error:
        read({key: True})
    for known in ("enabled", "device_budget", "policy", "debug", "report"):
        assert known in str(error.value)


def test_an_unknown_key_is_refused_even_when_disabled() -> None:
    with pytest.raises(ConfigError, match="unknown key 'zzz'. Known: enabled, device_budget"):
        read({"enabled": False, "zzz": 1})


def test_a_key_that_is_not_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key 3"):
        read({3: True})


@pytest.mark.parametrize("section", [True, "on", 1, [], [("enabled", True)], None])
def test_a_section_that_is_not_an_object_is_refused(section: object) -> None:
    with pytest.raises(ConfigError, match="is not an object"):
        read(section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"enabled": 1}, r"finepage\.enabled: 1 is not a truth value"),
        ({"enabled": "true"}, "not a truth value"),
        ({"enabled": None}, "not a truth value"),
        ({"device_budget": None}, "not a budget"),
        ({"device_budget": "40%"}, "ambiguous"),
        ({"policy": None}, r"finepage\.policy: None is not a text"),
        ({"policy": 3}, "is not a text"),
        ({"policy": "fine_page"}, "unknown policy 'fine_page'. Did you mean 'finepage'?"),
        ({"policy": "horizon-outputs"}, "unknown policy 'horizon-outputs'. Did you mean 'horizon"),
        ({"policy": "zzz"}, "unknown policy 'zzz'. Known: finepage, horizon"),
        ({"plan_dir": "plans"}, r"finepage\.plan_dir is gone: each start plans again"),
        ({"weights_dir": " "}, r"finepage\.weights_dir: ' ' is not a text"),
        ({"report": True}, r"finepage\.report: True is not a text"),
        ({"report": ""}, "is not a text"),
        (
            {"weights": "int3"},
            r"finepage\.weights: 'int3' is unknown. "
            r"Write \"int8\", \"int4\", \"int8\+output\" or \"int4\+output\"\.",
        ),
        ({"weights": 4}, r"finepage\.weights: 4 is unknown"),
        (
            {"kv_cache": "card"},
            r"finepage\.kv_cache: 'card' is unknown. Write \"auto\", \"device\" or \"host\"\.",
        ),
        ({"kv_cache": True}, r"finepage\.kv_cache: True is unknown"),
        ({"weights_group": "64"}, r"finepage\.weights_group: '64' is not a whole number"),
        ({"weights_group": 0}, r"finepage\.weights_group: 0 is not above 0"),
        ({"weights_group": 33}, r"finepage\.weights_group: 33 is odd"),
    ],
)
def test_bad_values_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(section)


# --- the section inside a ds_config ------------------------------------------------------------


def test_the_section_is_found() -> None:
    assert section_of({"finepage": {"enabled": True}, "steps_per_print": 1}) == {"enabled": True}


def test_a_ds_config_without_the_section_has_none() -> None:
    assert section_of({"train_micro_batch_size_per_gpu": 1, "finetune": {}, "page": 1}) == {}


def test_deepspeeds_own_quantisation_beside_ours_is_refused() -> None:
    theirs: dict[str, Any] = {"weight_quantization": {"post_init_quant": {}}}
    with pytest.raises(ConfigError, match=r"finepage\.weights and DeepSpeed's weight_quantization"):
        section_of({"finepage": {"weights": "int4"}, **theirs})
    assert section_of({"finepage": {"enabled": True}, **theirs}) == {"enabled": True}
    assert section_of(theirs) == section_of({"finepage": None}) == {}


@pytest.mark.parametrize("key", ["finepge", "fine_page", "FinePage", "finepages"])
def test_a_misspelt_section_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'. Did you mean 'finepage'?"):
        section_of({key: {"enabled": True}})


def test_nearest_names_one_or_nothing() -> None:
    assert nearest("LLAMA-7", ["llama-7b", "t5"]) == "Did you mean 'llama-7b'? "
    assert nearest("llama-7", ["llama-7b"], cutoff=0.99) == nearest("zzz", ["a"]) == ""


def test_did_you_mean_lists_what_is_known() -> None:
    assert (
        did_you_mean("llama-7", ["llama-7b", "t5"])
        == "Did you mean 'llama-7b'? Known: llama-7b, t5."
    )
    assert did_you_mean("zzz", ["a", "b"]) == "Known: a, b."


def test_the_names_of_packed_forms_are_the_same_everywhere() -> None:
    assert get_args(PackedName) == PACKED_FORMS
