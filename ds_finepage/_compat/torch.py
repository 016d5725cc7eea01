"""torch's private and experimental names.

Callers import the objects themselves, so a hot path pays for no extra lookup.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch._C import _construct_storage_from_data_pointer, _disabled_torch_function_impl
from torch._C._autograd import _enable_record_function, _profiler_enabled
from torch._C._distributed_c10d import _resolve_process_group
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import (
    get_eval_frame_callback,
    reset_code,
    set_code_exec_strategy,
)
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    pop_dynamic_layer_stack,
)
from torch._dynamo import config as dynamo_config
from torch._dynamo import maybe_mark_dynamic, trace_rules
from torch._dynamo.callback import callback_handler
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.eval_frame import (
    OptimizedModule,
    _debug_get_cache_entry_list,
    skip_code,
)
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    free_symbols,
    has_free_unbacked_symbols,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges

GLOBAL_HOOKS = (_global_forward_pre_hooks, _global_forward_hooks)
"""The hooks around every module of the process, by number."""


def group_named(name: str) -> ProcessGroup:
    """Return the process group of a name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]  # a str of a type of its own


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
