"""torch's function transforms, such as ``torch.vmap``, in graphs that fail."""

from collections.abc import Iterator
from contextlib import contextmanager

from ds_finepage._compat.torch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack


@contextmanager
def leaving_no_transform() -> Iterator[None]:
    """End the transforms that a graph has begun when an error keeps it from ending them.

    In a graph the begin and the end of ``vmap`` are nodes. Without the end, all of the program's
    later ops would run in that ``vmap``.
    """
    depth = get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        while get_dynamic_layer_stack_depth() > depth:
            pop_dynamic_layer_stack()
