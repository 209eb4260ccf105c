"""All private parts of torch that mimose uses.

No other module of the library (except benchmarks) names a private part of torch, so a
new version of torch must be checked only here: what each part is for, where torch's
developers discuss it, and what happens without it. Unless noted, a part exists in every
torch from 2.9 to 2.13, and the library does not work without it. `scripts/gpu check`
shows which parts an installation has. Numbers with a hash are threads of
github.com/pytorch/pytorch.

Aliases are the objects themselves, so they add no call in a step.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd import Variable, forward_ad
from torch.nn.modules import module as _modules
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch, _pytree, checkpoint
from torch.utils.data.dataloader import _BaseDataLoaderIter

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""The address of a storage's C++ object: equal for all that share it, while it lives.

``data_ptr()`` is public, but 0 for empty storages and for those without data. No thread
about a public form was found.
"""

storage_users: Callable[[int], int] = torch._C._storage_Use_Count
"""The number of C++ owners of a storage, by its `storage_key`. Made for CUDA graphs
(#98944); the method of the storage itself is private, too (#139426)."""


def tensor_users(tensor: torch.Tensor) -> int:
    """Return the number of C++ owners of a tensor (#117166).

    0 if torch lacks it: then a saved input without gradient is noticed only by the
    references to its Python object.
    """
    count: Callable[[], int] | None = getattr(tensor, "_use_count", None)
    return 0 if count is None else count()


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often a tensor was edited in place; an error for inference tensors. Autograd
compares it before a backward. Only ``torch.autograd.graph.increment_version`` is
public; no thread about reading it was found."""

base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""The tensor that this one is a view of. Named in torch's page on tensor views; no
thread about a public form was found."""


_Tensors: TypeAlias = Callable[[nn.Module], dict[str, torch.Tensor | None]]

parameters_of: _Tensors = operator.attrgetter("_parameters")
"""A module's own parameters by name: the dictionary itself, read in each step. The
public ``named_parameters`` iterates it, without None and repeats. No thread found; as
old as ``nn.Module``."""

buffers_of: _Tensors = operator.attrgetter("_buffers")
"""The same for buffers."""

submodules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter(
    "_modules"
)
"""The same for modules."""


def forward_hooks_of(module: nn.Module) -> tuple[tuple[Any, Any], ...]:
    """Return the tables of hooks after and before a module's forward, by handle.

    Each with the table of hooks that take keywords. No thread found.
    """
    return (
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    )


global_forward_hooks: tuple[tuple[Any, Any], ...] = (
    (_modules._global_forward_hooks, _modules._global_forward_hooks_with_kwargs),
    (_modules._global_forward_pre_hooks, {}),
)
"""The same for hooks on all modules; those before a forward get no keywords."""


queue_callback: Callable[[Callable[[], None]], None] = (
    Variable._execution_engine.queue_callback
)
"""Calls a function when the running backward has ended, not if it fails. #66199 asks
for a public form, and #193958 offers ``torch.autograd.graph.queue_callback``, not in
2.13."""

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread. ``torch.autograd.graph`` and
``torch.utils.module_tracker`` (#125634) read it too; no thread about a public form was
found."""

NO_GRAPH_TASK = -1
"""Its value outside a backward."""

next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of autograd's next node in this thread; distinguishes newer tensors from
older ones. Added for #103129."""

sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The number of a node, as of a tensor's ``grad_fn``. From #103129 as well."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward keeps its graph for another one.
``torch.utils.checkpoint`` reads it too; no thread about a public form was found."""


def is_of_own_function(node: object) -> bool:
    """Whether a node of autograd is that of a user's ``autograd.Function``."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def is_in_own_function() -> bool:
    """Whether the running node is that of a user's ``autograd.Function``.

    ``torch.autograd.graph`` does not give the running node; no thread found.
    """
    return is_of_own_function(torch._C._current_autograd_node())


def output_of(node: Any, number: int) -> Any:
    """Return shape, dtype and device of a node's output.

    Added for compiled autograd (#103822).
    """
    return node._input_metadata[number]


def gradient_bytes(node: Any) -> int:
    """Return the bytes of the largest gradient that a node gets: see `output_of`."""
    metadata = [m for m in node._input_metadata if not m.is_nested_tensor]
    sizes = (math.prod(m.shape) * m.dtype.itemsize for m in metadata)
    return max(sizes, default=0)


def saved_names(node: Any) -> tuple[str, ...]:
    """Return the names under which a node has saved tensors.

    Tensors of Python functions have numbers instead, and are not included. Torch shows
    what nodes save for tests and tools such as torchviz (#52451), with the same prefix
    since then.
    """
    prefix = "_raw_saved_"
    return tuple(
        name.removeprefix(prefix)
        for name in dir(type(node))
        if name.startswith(prefix) and name != f"{prefix}tensors"
    )


def saved_value(node: Any, name: str) -> Any:
    """Return what a node has saved: a tensor, or another argument. See `saved_names`.

    Raises:
        RuntimeError: The tensor was edited in place since, or the graph was freed.
    """
    return getattr(node, f"_saved_{name}")


def saved_handle(node: Any, name: str) -> Any:
    """Return the handle of a saved tensor, which takes hooks (#60685)."""
    return getattr(node, f"_raw_saved_{name}")


SavedHooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]
"""The functions that pack a tensor saved for the backward, and unpack it."""

_autograd: Any = torch._C._autograd

top_saved_hooks: Callable[[bool], SavedHooks | None] = (
    _autograd._top_saved_tensors_default_hooks
)
"""The hooks that are called for tensors saved now; None without. Only the innermost are
called (#70932), so hooks that are added must call them. The argument: whether to return
also hooks that are switched off while a compiler traces."""

push_saved_hooks: Callable[..., None] = _autograd._push_saved_tensors_default_hooks
"""Adds innermost hooks (#61834). The public context manager
``torch.autograd.graph.saved_tensors_hooks`` does the same with four more Python calls
for each recomputed layer."""

pop_saved_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
"""Removes the innermost hooks."""


may_push_saved_hooks: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled
"""Whether hooks of saved tensors may be pushed. Transforms of torch.func and
``torch.autograd.graph.disable_saved_tensors_hooks`` forbid it (#85971)."""


def drop_saved_hooks(outer: SavedHooks | None) -> None:
    """Remove all hooks that were pushed inside some others.

    An interrupt may come between a push and the ``try`` after it. Hooks that stay would
    get every tensor that is saved from then on.

    Args:
        outer: What `top_saved_hooks` returned before.
    """
    while True:
        now = top_saved_hooks(False)
        if now is None or (outer is not None and now[0] is outer[0]):
            return
        pop_saved_hooks()


n_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""The number of function modes, such as ``with torch.device(...)``, which `checkpoint`
restores for a recomputation. Only adding a mode is public (#78120)."""


def function_modes() -> tuple[object, ...]:
    """Return the function modes, the outermost first. No public form (#78120)."""
    number = n_function_modes()
    return tuple(map(torch._C._get_function_stack_at, range(number))) if number else ()


def set_function_modes(modes: Sequence[object]) -> None:
    """Replace the function modes by these."""
    while n_function_modes():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


top_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack
"""The running transform of ``torch.func``; None outside. Torch reads it for the same
reason in #140439; no thread about a public form was found."""


def choose_attention(query: torch.Tensor) -> int:
    """Return the kernel that self-attention of a tensor would use (#169849)."""
    return int(torch._fused_sdp_choice(query, query, query))


KERNEL_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = tuple(
    (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{setter}"))
    for name, setter in (
        ("flash_sdp_enabled", "sdp_use_flash"),
        ("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
        ("math_sdp_enabled", "sdp_use_math"),
        ("cudnn_sdp_enabled", "sdp_use_cudnn"),
        ("overrideable_sdp_enabled", "sdp_use_overrideable"),
        ("sdp_priority_order", "sdp_priority_order"),
        ("cudnn_enabled", "cudnn_enabled"),
        ("cudnn_benchmark", "cudnn_benchmark"),
        ("cudnn_deterministic", "cudnn_deterministic"),
        ("cudnn_allow_tf32", "cudnn_allow_tf32"),
        ("mkldnn_enabled", "mkldnn_enabled"),
    )
    if hasattr(torch._C, f"_get_{name}") and hasattr(torch._C, f"_set_{setter}")
)
"""Flags that choose kernels of attention, of convolutions and of products on a CPU;
read in each recomputed call. `torch.backends` has public forms of most, with up to
three Python calls each, but none of the order of attention kernels (#135485). A pair
that an installation lacks is left out: a recomputation may then use another kernel."""

matmul_precision: Callable[[], str] = torch._C._get_float32_matmul_precision
"""What ``torch.get_float32_matmul_precision`` reads; read beside `KERNEL_FLAGS`."""


CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
"""The name under which ``checkpoint_wrapper`` holds a module. If it changed, a wrapped
layer would be recomputed twice. No thread found."""

StopRecomputation = checkpoint._StopRecomputationError
"""Ends a recomputation after the last needed tensor. Code that counts a recomputation
must raise it again. The early stop is public (#96866, #160781), the exception is not.
"""


def is_from_checkpoint(pack: object) -> bool:
    """Whether a hook on saved tensors is that of a region's first run.

    Its class is local to a function, so it is recognized by its name (since #90105). If
    the name changes, a layer inside a region of the user is compared in its first call,
    although that region is recomputed.

    Args:
        pack: The first of two hooks.
    """
    return getattr(pack, "__qualname__", "").startswith("_checkpoint_hook.")


COMPILED_CALL = "_compiled_call_impl"
"""The attribute that ``module.compile()`` sets. A module's call runs it if it is not
None (#97565). Torch itself leaves it out of copies and pickles."""

COMPILED_MODULE = "_orig_mod"
"""The name of the module in the wrapper that ``torch.compile(module)`` returns. It is
part of the names in its ``state_dict``, so it can hardly change (#97565)."""

COMPILED_FROM = "_torchdynamo_orig_callable"
"""The attribute of a compiled function with the original function. No thread found. If
it changed, ``layer.forward = torch.compile(layer.forward)`` would count as a plain
forward."""

NOT_COMPILED = "_torchdynamo_disable"
"""The attribute of what ``torch.compiler.disable`` returns, which has `COMPILED_FROM`,
too. No thread found. If it changed, such a function would count as compiled."""

COMPILED_NODE = "CompiledFunction"
"""The begin of the names of nodes that compiled code makes in a graph, with any backend
that also compiles the backward. No thread found. If it changed, compiled code that a
layer's attributes and forward do not name would count as plain operators."""

SCRIPTED_NODE = "DifferentiableGraphBackward"
"""The end of the names of nodes that TorchScript's executor makes. No thread found. If
it changed, a layer whose scripted code cannot be found would fail more often."""

SCRIPTED_TYPES = (
    torch.jit.ScriptModule,
    torch.jit.ScriptFunction,
    torch._C.ScriptMethod,
)
"""Modules, functions and methods of TorchScript. Only the type of methods is private.
No thread found."""

eval_frame_callback: Callable[[], object] = (
    torch._C._dynamo.eval_frame.get_eval_frame_callback
)
"""The callback that compiles this thread's frames; None if there is none. To hide a
call with ``torch.compiler.disable`` takes ten more calls; to read this first takes none
in Python. No thread about a public form was found."""


def set_graphs_by_use(by_use: bool) -> None:
    """Try the graphs of a call by their last use, as torch does, or by their age.

    By last use, a recomputation may use another graph than its forward (#166926).
    #167038 added the switch; a torch without it ignores this call.

    Args:
        by_use: Whether the graph used last is tried first.
    """
    switch: Callable[[bool], None] | None
    switch = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if switch is not None:
        switch(by_use)


TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""A mode that gets every operator. Torch's page on extending it documents it (#110073),
only under this private path."""

without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[Any]] = (
    _python_dispatch._disable_current_modes
)
"""A context in which no such mode is active. Torch's compiler uses it; no thread about
a public form was found."""

pytree = _pytree
"""Flattens and rebuilds nested containers, also registered ones of the user. #175082
offers ``torch.utils.pytree``, not in 2.13."""

overload_packet: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")
"""All overloads of an operator: the key of ``torch.utils.flop_counter.flop_registry``,
which torch reads in the same way. No thread found."""

without_autocast: Callable[[], Any] = torch._C._DisableAutocast
"""A context in which operators do not cast, on any device, and the cache of copies
stays. ``torch.autocast(kind, enabled=False)`` is for one kind of device, and frees the
cache at its end. Torch's compiler uses it; no thread about a public form was found."""

to_copy: Any = torch.ops.aten._to_copy.default
"""The operator of every conversion to another precision in a dispatch mode:
``Tensor.to`` runs it. Backends of torch.compile get it, so it can hardly change; no
thread found."""

_aten: Any = torch.ops.aten

log_softmax_into: Any = _aten._log_softmax.out
"""What ``torch.nn.functional.cross_entropy`` runs on its logits, into existing memory.
Backends of torch.compile get it and the next three, so they can hardly change; no
thread about public forms was found."""

log_softmax_backward_into: Any = _aten._log_softmax_backward_data.out
"""The same for the gradient of the logits."""

nll_loss: Any = _aten.nll_loss_forward.default
"""What it runs on that log-softmax; also returns the weight of all rows that count."""

nll_loss_backward_into: Any = _aten.nll_loss_backward.grad_input
"""The gradient of the log-softmax."""


device_statistics: Callable[[int], Mapping[str, Any]] = (
    torch._C._accelerator_getDeviceStats
)
"""An allocator's statistics, nested, by a device's index, in 11 µs. The public
``torch.accelerator.memory_stats`` flattens them and takes 136 µs (#152932 leaves the
nested form private until a user needs it)."""


def allocator_settings() -> str:
    """Return the allocator's settings, also those set at run time; "" if not known.

    Added with one configuration for all accelerators (#149601, #165291).
    """
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return "" if settings is None else str(settings())


def empty_host_cache() -> None:
    """Free the cached blocks of the allocator of pinned memory.

    Newer versions of torch have the public ``torch.accelerator.empty_host_cache``
    (#171270), which must not be called on devices without such an allocator (#197561).
    Older ones have CUDA's (#134332). Without both, nothing is freed.
    """
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    empty = empty or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def group_timeout(group: Any) -> timedelta | None:
    """Return the timeout of a group's collectives; None if not known.

    Setting it is public, reading it is not since #56531. With several backends, the
    longest timeout counts.
    """
    found = []
    with contextlib.suppress(AttributeError, RuntimeError):
        for device in group._device_types:
            found.append(group._get_backend(device).options._timeout)
    return max(found, default=None)


def is_managed_by_fsdp(module: nn.Module) -> bool:
    """Whether a module's own parameters are in a group of ``fully_shard``.

    Torch sets it for torch.compile; no thread found. Without it, sharded parameters
    would count as those of tensor parallelism.
    """
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters of a module that ``fully_shard`` was called on.

    mimose reads their ``fsdp_params`` (with ``sharded_param``, which the optimizer
    updates, and gradients that are not reduced yet), ``mesh_info``, ``mp_policy``,
    ``reduce_grads`` and ``_reshard_after_forward``. Only setting these is public; no
    thread about a public way to read them was found. Seen in 2.9 (one group for each
    module) and in 2.13 (several).

    Args:
        module: The module.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def reshards_after_forward(group: Any) -> bool:
    """Whether one of `fsdp_groups` frees its whole parameters after a call."""
    return bool(group._reshard_after_forward)


def host_offload_of(group: Any) -> torch.device | None:
    """Return the device of one of `fsdp_groups` that offloads parameters to the host.

    None if it does not. The policy is public, but not how to read it from a group.
    """
    policy: object = getattr(group, "offload_policy", None)
    is_offloaded = type(policy).__name__ == "CPUOffloadPolicy"
    device: torch.device | None = group.device if is_offloaded else None
    return device


def shards_over(group: Any) -> int:
    """Return the number of ranks over which one of `fsdp_groups` is sharded."""
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def fsdp_buffers(group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what one of `fsdp_groups` has gathered, and gradients that it reduces.

    torch's own memory tracker wraps the functions that make them; no public way was
    found. Seen in 2.9 (one reduction at a time) and in 2.13 (several).
    """
    shared = group.comm_ctx
    earlier = getattr(shared.all_gather_state, "all_gather_result", None)
    results = [r for r in (group._all_gather_result, earlier) if r is not None]
    gathered = [each.all_gather_output for each in results]
    gathered += [t for each in group.fsdp_params for t in each.all_gather_outputs]
    states = getattr(shared, "reduce_scatter_states", None)
    if states is None:
        states = [s for s in (shared.reduce_scatter_state,) if s is not None]
    return gathered, [state.reduce_scatter_input for state in states]


def waits_unreduced(fsdp_param: Any) -> bool:
    """Whether an FSDP parameter has a whole gradient that is not reduced yet."""
    whole = getattr(fsdp_param, "_unsharded_param", None)
    return fsdp_param.unsharded_accumulated_grad is not None or (
        whole is not None and whole.grad is not None
    )


def sharded_weights(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Return the sharded weights of the groups of a module of ``fully_shard``.

    Each has its module and its name there. In the module's table, whole weights replace
    them for a while; an optimizer updates the sharded ones. No thread about a public
    way was found; seen in 2.9 and 2.13.
    """
    return [
        (each._module_info.module, each._module_info.param_name, each.sharded_param)
        for group in fsdp_groups(module)
        for each in group.fsdp_params
    ]


_FORBIDDING: Any = torch.autograd.graph.disable_saved_tensors_hooks
_FORBIDS = _FORBIDDING.__wrapped__.__code__


def is_from_forbidden_hooks(error: BaseException) -> bool:
    """Whether an error says that hooks on saved tensors are forbidden.

    The code that forbids them, such as transforms of ``torch.func``, chooses the text,
    so the error is recognized by where it was raised. If that changed, the error would
    reach the user, as under ``torch.utils.checkpoint``. No thread about a public form
    was found.

    Args:
        error: The error.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is _FORBIDS


def is_dual_level_open() -> bool:
    """Whether a level of forward-mode differentiation is open.

    Only opening one is public; no thread about a way to read it was found.
    """
    return bool(forward_ad._current_level >= 0)


def are_parametrizations_cached() -> bool:
    """Whether ``parametrize.cached()`` is on, so that each weight is computed once.

    Only turning it on is public; no thread about a way to read it was found.
    """
    return bool(parametrize._cache_enabled)


cached_parametrizations: Callable[[], dict[tuple[int, str], Any]]
cached_parametrizations = functools.partial(getattr, parametrize, "_cache")
"""Returns what ``parametrize.cached()`` has computed so far, to forget some of it.

Only turning it on is public; no thread about a way to read it was found.
"""


def draws_ahead(iterator: Any) -> int:
    """Return how many batches a loader's iterator draws before the first is trained.

    0 without workers, and for everything else. Without it a sampler would take loaders
    of several ranks for alike, and they may wait for each other forever if they have
    other numbers of workers.
    """
    if not isinstance(iterator, _BaseDataLoaderIter):
        return 0
    workers = int(iterator._num_workers)
    return workers * int(getattr(iterator, "_prefetch_factor", None) or 0)


memory_info: Callable[[int], tuple[int, int]] = torch._C._accelerator_getMemoryInfo
"""Returns the free and the whole bytes of an accelerator, by index. Public from torch
2.10 on, as ``torch.accelerator.get_memory_info``."""

register_device_module: Callable[[str, Any], None] = torch._register_device_module
"""Gives a user's device its module, such as ``torch.sim``. The tutorials for
such devices name it; there is no other way."""


def begin_one_of_ranks(device_type: str, n_ranks: int) -> None:
    """Begin a process group in which this process stands for rank 0 of many.

    It sends nothing. torch keeps it for its own tests (#97100); no thread about a
    public form was found.

    Args:
        device_type: The type of device that takes part beside the CPU.
        n_ranks: How many ranks there seem to be.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg

    name = "one_of_ranks"
    devices = ["cpu", device_type]
    dist.Backend.register_backend(
        name, fake_pg._create_fake_pg, extended_api=True, devices=devices
    )
    dist.init_process_group(
        ",".join(f"{device}:{name}" for device in devices),
        rank=0,
        world_size=n_ranks,
        store=fake_pg.FakeStore(),
    )
