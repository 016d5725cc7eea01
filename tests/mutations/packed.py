"""Faults of plans, commands and engines with packed weights."""

from __future__ import annotations

from tests.mutations.mutant import mutant

ARMS = "integration/compare/test_packed_arms.py"
COMMANDS = "integration/cli/test_weights.py"
OPTIONS = "unit/compare/test_cli_compare.py"
STOCK = "unit/packing/test_stock.py"
AHEAD = "integration/test_look_ahead.py"
PLANNING = "unit/planning"

PACKED = (
    mutant(
        "the-output-layer-is-never-packed",
        "packing/model.py",
        "_tied(module) if packs_output else get_keys_to_not_convert(module)",
        "get_keys_to_not_convert(module)",
        "unit/packing/test_pack_model.py",
    ),
    mutant(
        "a-tied-output-layer-is-packed",
        "packing/model.py",
        "patterns += _tied(module) if packs_output",
        "patterns += [] if packs_output",
        "integration/test_packed_loading.py::test_the_output_layer_is_packed_as_it_comes",
    ),
    mutant(
        "a-pass-is-captured-with-unpacked-weights",
        "capture/from_config.py",
        "        prepare_shapes(model, prepare)\n",
        "",
        COMMANDS,
        is_named=True,
    ),
    mutant(
        "tied-weights-come-apart-where-a-model-is-packed",
        "capture/preparing.py",
        "if old not in moved:",
        "if True:",
        f"{COMMANDS}::test_tied_weights_stay_tied",
    ),
    mutant(
        "a-cell-of-a-grid-takes-the-pass-of-another-form",
        "cli/grid.py",
        "key = (*shape, phase, dtype, cell.weights)",
        "key = (*shape, phase, dtype)",
        f"{COMMANDS}::test_cells_of_another_form_are_captured_again",
    ),
    mutant(
        "a-grid-goes-on-with-cells-of-another-group",
        "cli/grid.py",
        "self._host_memory_bytes, self._weights_group]",
        "self._host_memory_bytes]",
        f"{COMMANDS}::test_finished_cells_of_another_group_are_not_taken",
    ),
    mutant(
        "stock-is-modelled-in-our-layout",
        "whatif.py",
        "        captured = captured.as_stock\n    forms",
        "        captured = captured\n    forms",
        f"{COMMANDS}::test_stock_is_modelled_with_its_own_packing",
    ),
    mutant(
        "stock-runs-in-our-layout",
        "compare/zero_arms.py",
        "load_model(request, pack_as_stock)",
        "load_unpacked(request)",
        ARMS,
    ),
    mutant(
        "a-model-that-is-quantised-already-is-packed",
        "whatif.py",
        "    if own is not None:",
        "    if False:",
        f"{COMMANDS}::test_a_model_that_is_quantised_already_is_refused",
    ),
    mutant(
        "scales-lie-behind-minima-in-the-layout-of-stock",
        "packing/stock.py",
        "zip((numbers, scales, minima), self._shapes, strict=True)",
        "zip((numbers, minima, scales), self._shapes, strict=True)",
        STOCK,
    ),
    mutant(
        "a-comparison-forgets-the-form-of-the-weights",
        "cli/compare.py",
        'section |= {"weights": form, "weights_group": arguments.weights_group}',
        "pass",
        f"{OPTIONS}::test_the_form_of_the_weights_is_part_of_the_ds_config",
    ),
    mutant(
        "the-last-step-is-asked-for-with-unpacked-weights",
        "integrations/transformers/preflight.py",
        "None if form is None else functools.partial(pack_model, form=form)",
        "None",
        f"{AHEAD}::test_the_last_step_reads_the_weights_as_they_are_packed",
    ),
    mutant(
        "the-config-tells-the-last-step-of-a-quantised-model",
        "integrations/transformers/preflight.py",
        "if form is None and _is_quantised(self._module):",
        "if False:",
        f"{AHEAD}::test_weights_that_another_library_has_quantised_tell_nothing",
    ),
    mutant(
        "what-belongs-together-lies-apart",
        "planning/finepage/streaming.py",
        "order = [b for lead in order for b in (lead, *units.get(lead, ())) if b in sizes]",
        "order += [b for b in behind if b in sizes]",
        f"{PLANNING}/finepage/test_packed_weights.py",
    ),
    mutant(
        "kept-scales-of-streamed-numbers-lie-nowhere",
        "planning/finepage/streaming.py",
        "for lead, unit in units.items() if lead in sizes for b in unit}",
        "for unit in units.values() for b in unit}",
        f"{PLANNING}/finepage/test_packed_weights.py",
    ),
    mutant(
        "packed-weights-are-cut-inside-a-slice-of-the-op",
        "planning/rewrite/split.py",
        "    if weight.beside:\n        return SLICE_ROWS\n",
        "",
        f"{PLANNING}/finepage/test_packed_weights.py",
    ),
    mutant(
        "scales-stay-whole-beside-cut-numbers",
        "planning/finepage/residency.py",
        "if b not in cut_with]",
        "]",
        f"{PLANNING}/finepage/test_packed_weights.py",
    ),
    mutant(
        "unpacking-stays-whole",
        "planning/policies.py",
        "if not chosen.pages:\n        return graph\n    return unpack",
        "if True:\n        return graph\n    return unpack",
        f"{PLANNING}/rewrite/test_unpacking.py",
    ),
    mutant(
        "an-unpacked-weight-may-be-evicted",
        "planning/rewrite/unpacking.py",
        "touches=() if target in parts else (target,),",
        "touches=(made,) if is_whole else (),",
        f"{PLANNING}/rewrite/test_unpacking.py",
    ),
    mutant(
        "a-value-that-others-use-is-cut",
        "planning/rewrite/unpacking.py",
        "        if index not in found:\n            return False\n",
        "        if index not in found:\n            return True\n",
        f"{PLANNING}/rewrite/test_unpacking.py",
    ),
    mutant(
        "bounds-count-unpacked-copies",
        "planning/bounds.py",
        "unpacked_buffers(graph) if may_cut else frozenset[int]()",
        "frozenset[int]()",
        f"{PLANNING}/rewrite/test_unpacking.py",
    ),
    mutant(
        "packed-numbers-used-twice-are-always-kept",
        "planning/finepage/residency.py",
        "(len(times_used[b]) == 1 or b in runs)",
        "len(times_used[b]) == 1",
        f"{PLANNING}/rewrite/test_unpacking.py",
    ),
    mutant(
        "a-large-unpacked-weight-moves",
        "planning/horizon.py",
        "if not self._unpacked.isdisjoint(self._missing(task)):",
        "if False:",
        f"{PLANNING}/rewrite/test_unpacking.py",
    ),
)
