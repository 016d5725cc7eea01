"""Faults of weights that are cut where no bit changes, and of the output layer beside them."""

from __future__ import annotations

from tests.mutations.mutant import mutant

EXACT = "unit/planning/rewrite/test_exact_slices.py"
SLICED = "unit/packing/test_sliced.py"

SLICES = (
    mutant(
        "packed-weights-are-needed-whole-without-split",
        "planning/policies.py",
        "return slices_that_fit(gather_rows(graph), arena_bytes, alignment)",
        "return gather_rows(graph)",
        f"{EXACT}::test_policies_that_page_run_in_the_least_arena",
    ),
    mutant(
        "the-least-budget-is-that-of-whole-packed-weights",
        "planning/pipeline.py",
        "min_arena_bytes(smallest_slices(smallest) if looks_up_rows else smallest, alignment)",
        "min_arena_bytes(smallest, alignment)",
        f"{EXACT}::test_the_least_budget_is_that_of_slices",
    ),
    mutant(
        "with-split-slices-need-a-ring",
        "planning/finepage/search.py",
        "        problem = _in_exact_slices(problem)\n",
        "",
        f"{EXACT}::test_with_split_slices_stay_whole_where_a_ring_of_them_has_no_room",
    ),
    mutant(
        "with-split-the-least-arena-is-that-of-a-ring",
        "planning/finepage/search.py",
        "        least = min(least, min_arena_bytes(exact, alignment))\n",
        "        pass\n",
        f"{EXACT}::test_with_split_slices_stay_whole_where_a_ring_of_them_has_no_room",
    ),
    mutant(
        "slices-are-always-the-shortest",
        "planning/rewrite/exact_slices.py",
        "    return max(1, most_bytes // step)\n",
        "    return 1\n",
        f"{EXACT}::test_slices_are_as_long_as_the_room_allows",
    ),
    mutant(
        "weights-on-several-ranks-are-cut-into-slices",
        "planning/rewrite/exact_slices.py",
        "    if graph.parted:\n        return graph\n",
        "",
        f"{EXACT}::test_other_graphs_are_never_cut",
    ),
    mutant(
        "weights-that-are-not-packed-are-cut-without-split",
        "planning/rewrite/exact_slices.py",
        " if d.exact_rows is not None]",
        "]",
        f"{EXACT}::test_other_graphs_are_never_cut",
    ),
    mutant(
        "output-layers-are-cut-inside-a-slice-of-the-op",
        "planning/rewrite/split.py",
        "exact_rows = OUTPUT_ROWS if task.op == SLICED_LINEAR else CUT_ROWS",
        "exact_rows = CUT_ROWS",
        f"{EXACT}::test_slices_of_an_output_layer_give_the_bits_of_the_whole",
    ),
    mutant(
        "output-layers-multiply-by-the-whole-weight",
        "packing/sliced.py",
        "enumerate(weight.split(OUTPUT_ROWS))",
        "enumerate([weight])",
        f"{SLICED}::test_a_slice_of_the_layer_is_multiplied_at_a_time",
    ),
    mutant(
        "packed-models-keep-a-plain-output-layer",
        "packing/model.py",
        "    slice_output(model)\n",
        "",
        f"{SLICED}::test_a_packed_model_has_a_sliced_output_layer",
    ),
    mutant(
        "loaded-models-keep-a-plain-output-layer",
        "integrations/transformers/packed_loading.py",
        "        slice_output(model)\n",
        "",
        "integration/test_packed_loading.py"
        "::test_the_output_layer_is_sliced_where_it_is_not_packed",
    ),
    mutant(
        "sliced-products-count-no-arithmetic",
        "capture/counts.py",
        '    SLICED_LINEAR.removesuffix(".default"): _count_packed,\n',
        "",
        f"{SLICED}::test_it_counts_as_a_product",
    ),
)
