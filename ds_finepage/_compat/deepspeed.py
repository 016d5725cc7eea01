"""DeepSpeed's internal names. Imported only once DeepSpeed is loaded."""

from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload, ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import (
    Init,
    InsertPostInitMethodToModuleSubClasses,
    PartitionedParamStatus,
    ZeroParamStatus,
    _init_external_params,
    is_zero_param,
)
