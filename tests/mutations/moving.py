"""Faults of the seams: the files in which a model is taken over, run without a plan, given back."""

from __future__ import annotations

from tests.mutations.mutant import mutant

FALLBACK = "unit/execution/test_fallback.py"
OFFLOAD = "unit/integrations/test_offload.py"
STORES = ("unit/execution/test_stores.py", "unit/execution/test_weight_table.py")

MOVING = (
    mutant(
        "views-of-a-weight-may-be-written",
        "execution/fallback.py",
        "in self._fetched + self._viewed):",
        "in self._fetched):",
        FALLBACK,
        is_named=True,
    ),
    mutant(
        "weights-may-be-written-without-a-plan",
        "execution/fallback.py",
        "if any(tensor._version != version for",
        "if any(False for",
        FALLBACK,
    ),
    mutant(
        "dictionaries-of-parameters-are-not-given-back",
        "integrations/deepspeed/offload.py",
        "module._parameters = parameters",
        "pass",
        OFFLOAD,
        is_named=True,
    ),
    mutant(
        "torchs-linear-stays-exchanged",
        "integrations/deepspeed/offload.py",
        "torch.nn.functional.linear = found",
        "pass",
        OFFLOAD,
    ),
    mutant(
        "stock-hooks-come-back-while-attached",
        "integrations/deepspeed/offload.py",
        "super()._register_deepspeed_module(module, [0] if count is None else count)\n\n    def",
        "pass\n        super()._register_deepspeed_module(module, [0])\n\n    def",
        OFFLOAD,
    ),
    mutant(
        "weights-without-data-are-taken",
        "execution/masters.py",
        "if parameter.is_meta:",
        "if False:",
        "unit/execution/test_stores.py::test_a_parameter_on_the_meta_device_is_refused_by_name",
    ),
    mutant(
        "uses-of-data-are-not-seen",
        "execution/stores.py",
        "not self._used\n            and list",
        "True\n            and list",
        *STORES,
    ),
    mutant(
        "versions-are-not-compared",
        "execution/stores.py",
        "list(map(_VERSION, self._versioned)) == self._versions",
        "True",
        *STORES,
    ),
    mutant(
        "addresses-are-not-compared",
        "execution/stores.py",
        "and list(map(_ADDRESS, self._parameters)) == self._addresses",
        "and True",
        *STORES,
    ),
    mutant(
        "writes-into-a-filled-parameter-are-lost",
        "execution/stores.py",
        "_copy(shown.weight.value, copy)",
        "pass",
        *STORES,
    ),
    mutant(
        "changes-before-detach-are-lost",
        "execution/stores.py",
        "        self.unload()\n        self.changes()",
        "        self.unload()",
        *STORES,
    ),
    mutant(
        "a-parameter-that-zero-frees-is-empty",
        "execution/stores.py",
        "return self.view if is_freed else value",
        "return value",
        *STORES,
    ),
    mutant(
        "swapped-partitions-overwrite-each-other",
        "execution/stores.py",
        "return value.clone() if is_master else value",
        "return value",
        *STORES,
    ),
    mutant(
        "a-tensor-made-by-data-is-forgotten",
        "execution/watch.py",
        "self._aliases.append(weakref.ref(alias))",
        "pass",
        *STORES,
    ),
    mutant(
        "data-stays-a-property",
        "execution/watch.py",
        "del torch.nn.Parameter.data",
        "pass",
        *STORES,
    ),
    mutant(
        "weights-of-an-attached-model-are-taken",
        "execution/masters.py",
        "refuse_watched(name, parameter)",
        "pass",
        *STORES,
    ),
    mutant(
        "copies-keep-our-hooks",
        "execution/fallback.py",
        "return ignore_call\n\n    def __reduce__",
        "return self\n\n    def __reduce__",
        FALLBACK,
    ),
    mutant(
        "threads-outlive-their-lanes",
        "execution/lanes.py",
        "weakref.finalize(self, worker.end)",
        "pass",
        "unit/execution/test_lanes.py",
    ),
    mutant(
        "streams-run-on-behind-an-error",
        "execution/lanes.py",
        "self._device.synchronize()\n            raise",
        "raise",
        "unit/execution/test_lanes.py",
    ),
    mutant(
        "lanes-of-an-accelerator-are-never-delayed",
        "execution/lanes.py",
        "self._device.delay(stream,",
        "min(0,",
        "unit/execution/test_lanes.py",
    ),
    mutant(
        "a-second-accelerator-is-taken",
        "execution/device.py",
        "if accelerator.type != where.type:",
        "if False:",
        "unit/execution/test_device.py",
    ),
    mutant(
        "a-device-without-statistics-is-taken",
        "execution/device.py",
        "if device.live_bytes - before < held.numel():",
        "if False:",
        "unit/execution/test_device.py",
    ),
    mutant(
        "shown-memory-is-freed-under-its-tensors",
        "execution/device.py",
        "storage._memory = host",
        "storage._memory = None",
        "unit/execution/test_device.py",
    ),
)
