"""All that is used of torch without being promised by it.

Nothing else in the library (its benchmarks aside) names a private part of torch, so
that a new version is looked through here: what each part is for, where torch's own
people speak of it, and what happens without it. Unless something else is said it was
seen in every torch from 2.9 to 2.13, and the library does not work without it.
`scripts/gpu check` tells which parts an installation has. Numbers with a hash are
threads of github.com/pytorch/pytorch.

Aliases are the thing itself: what is called in every step costs no call more.
"""

from __future__ import annotations

import contextlib
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

# ------------------------------------------------------------- tensors and storages

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""The address of a storage's C++ half: equal for all that share it, while it lives.

``data_ptr()`` is public, but 0 for empty storages and for those without data. No thread
about a public form was found.
"""

storage_users: Callable[[int], int] = torch._C._storage_Use_Count
"""How many C++ owners a storage has, by its `storage_key`. Made for CUDA graphs
(#98944); its form on the storage itself was kept private, too (#139426)."""


def tensor_users(tensor: torch.Tensor) -> int:
    """Return how many C++ owners a tensor has (#117166).

    0 where torch does not tell: an input without gradient that a layer saves is then
    noticed by the references to its Python object alone.
    """
    count: Callable[[], int] | None = getattr(tensor, "_use_count", None)
    return 0 if count is None else count()


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often a tensor was changed in place; an error for inference tensors. Autograd
compares it before a backward. ``torch.autograd.graph.increment_version`` is the public
half; no thread about this one was found."""

base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""The tensor that this one is a view of. Named in torch's page on tensor views; no
thread about a public form was found."""

# ------------------------------------------------------------------------- modules

_Tensors: TypeAlias = Callable[[nn.Module], dict[str, torch.Tensor | None]]

parameters_of: _Tensors = operator.attrgetter("_parameters")
"""A module's own parameters by name: the dictionary itself, read again in each step.
The public ``named_parameters`` walks it, and leaves out what is None or seen already.
No thread found; as old as ``nn.Module``."""

buffers_of: _Tensors = operator.attrgetter("_buffers")
"""The same for buffers."""

submodules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter(
    "_modules"
)
"""The same for modules."""


def forward_hooks_of(module: nn.Module) -> tuple[tuple[Any, Any], ...]:
    """Return the tables of hooks before and behind a module's forward, by handle.

    Each with that of the hooks that are given keywords. No thread found.
    """
    return (
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    )


global_forward_hooks: tuple[tuple[Any, Any], ...] = (
    (_modules._global_forward_hooks, _modules._global_forward_hooks_with_kwargs),
    (_modules._global_forward_pre_hooks, {}),
)
"""The same of the hooks on all modules; those before a forward get no keywords."""


# ------------------------------------------------------------------------ autograd

queue_callback: Callable[[Callable[[], None]], None] = (
    Variable._execution_engine.queue_callback
)
"""Call something when the running backward has ended. #66199 asks for a public form,
and #193958 offers ``torch.autograd.graph.queue_callback``, not in 2.13. Not called
where a backward fails."""

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread. ``torch.autograd.graph`` and
``torch.utils.module_tracker`` (#125634) read it too; no thread about a public form was
found."""

NO_GRAPH_TASK = -1
"""What it says outside of any backward."""

next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that autograd's next node of this thread gets: tells tensors made since
from older ones. Bound for #103129."""

sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The number of a node, as of a tensor's ``grad_fn``. From #103129 as well."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward leaves its graph for another. Read by
``torch.utils.checkpoint`` in the same way; no thread about a public form was found."""


def is_in_own_function() -> bool:
    """Whether the node that runs is that of a user's ``autograd.Function``.

    ``torch.autograd.graph`` has no form that tells the running node; no thread found.
    """
    node = torch._C._current_autograd_node()
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def output_of(node: Any, number: int) -> Any:
    """Return shape, dtype and device of a node's output, as of its gradient.

    Bound for compiled autograd (#103822).
    """
    return node._input_metadata[number]


def saved_names(node: Any) -> tuple[str, ...]:
    """Return the names under which a node has saved tensors.

    Those of Python's own functions are numbered and not among them. What nodes save is
    shown to Python for tests and tools such as torchviz (#52451), and each name begins
    in the same way since then.
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
        RuntimeError: The tensor was edited in place since, or the graph is gone.
    """
    return getattr(node, f"_saved_{name}")


def saved_handle(node: Any, name: str) -> Any:
    """Return the handle of a saved tensor, which takes hooks (#60685)."""
    return getattr(node, f"_raw_saved_{name}")


SavedHooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]
"""What packs a tensor that is saved for backward, and what unpacks it."""

_autograd: Any = torch._C._autograd

top_saved_hooks: Callable[[bool], SavedHooks | None] = (
    _autograd._top_saved_tensors_default_hooks
)
"""The hooks that are called for tensors saved now; None without. Only the innermost
are (#70932), so whoever adds some calls them. The argument: whether to return those,
too, that are switched off while a compiler traces."""

push_saved_hooks: Callable[..., None] = _autograd._push_saved_tensors_default_hooks
"""Begin to call other hooks (#61834). The public context manager
``torch.autograd.graph.saved_tensors_hooks`` does the same, in four Python calls more a
recomputed layer."""

pop_saved_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
"""End what `push_saved_hooks` began."""


may_push_saved_hooks: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled
"""Whether hooks of saved tensors may be pushed: transforms of torch.func forbid it, and
so does ``torch.autograd.graph.disable_saved_tensors_hooks`` (#85971)."""


def drop_saved_hooks(outer: SavedHooks | None) -> None:
    """End all that `push_saved_hooks` began inside some others.

    An interrupt may come between a push and the ``try`` behind it. Hooks that stay
    would see every tensor that is saved from then on.

    Args:
        outer: What `top_saved_hooks` said before.
    """
    while True:
        now = top_saved_hooks(False)
        if now is None or (outer is not None and now[0] is outer[0]):
            return
        pop_saved_hooks()


n_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes see each call of a function, such as ``with torch.device(...)``, which
`checkpoint` sets again for a recomputation. Public is only what adds one (#78120)."""


def function_modes() -> tuple[object, ...]:
    """Return these modes, the outermost first. No public form (#78120)."""
    number = n_function_modes()
    return tuple(map(torch._C._get_function_stack_at, range(number))) if number else ()


def set_function_modes(modes: Sequence[object]) -> None:
    """Have these modes see calls, and no others."""
    while n_function_modes():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


top_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack
"""The transform of ``torch.func`` that runs; None outside of any. Asked by torch for
the same reason in #140439; no thread about a public form was found."""


def choose_attention(query: torch.Tensor) -> int:
    """Return the kernel that attention of a tensor to itself would take (#169849)."""
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
"""What chooses kernels of attention, of convolutions and of products on a CPU: read in
each recomputed call. `torch.backends` has public forms of most, in up to three Python
calls each; of the order of attention kernels there is none (#135485). A pair that an
installation lacks is left out: what it chooses is then not as in the forward."""

matmul_precision: Callable[[], str] = torch._C._get_float32_matmul_precision
"""What ``torch.get_float32_matmul_precision`` asks; read beside `KERNEL_FLAGS`."""

# ------------------------------------------------------------- torch.utils.checkpoint

CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
"""The name under which ``checkpoint_wrapper`` keeps a module. If it were another, a
wrapped layer would be recomputed twice over. No thread found."""

StopRecomputation = checkpoint._StopRecomputationError
"""Ends a recomputation after the last tensor that is needed, and has to be let through
by whoever counts what is recomputed. The early stop is public (#96866, #160781), the
exception is not."""


def is_from_checkpoint(pack: object) -> bool:
    """Whether a hook on saved tensors is that of a region's first run.

    Its class is made in a function and is not to be had, so it is known by its name
    (#90105 brought it). If that changes, a layer inside of a region of the user's is
    compared in its first call although that region is run again.

    Args:
        pack: The first of two hooks.
    """
    return getattr(pack, "__qualname__", "").startswith("_checkpoint_hook.")


# -------------------------------------------------------------------- torch.compile

COMPILED_CALL = "_compiled_call_impl"
"""The attribute that ``module.compile()`` sets, and that a module's call runs where it
is not None (#97565). Kept out of copies and pickles by torch itself."""

COMPILED_MODULE = "_orig_mod"
"""The name under which the wrapper that ``torch.compile(module)`` returns keeps the
module; part of the names in its ``state_dict``, so it can hardly change (#97565)."""

COMPILED_FROM = "_torchdynamo_orig_callable"
"""The attribute by which a compiled function is known, with what it was made from. No
thread found. If it were another, ``layer.forward = torch.compile(layer.forward)`` would
be taken for a plain forward."""

NOT_COMPILED = "_torchdynamo_disable"
"""The attribute of what ``torch.compiler.disable`` returns, which has `COMPILED_FROM`,
too. No thread found. If it were another, such a function would count as compiled."""

COMPILED_NODE = "CompiledFunction"
"""How the names of the nodes begin that compiled code makes in a graph, by any backend
that compiles the backward, too. No thread found. If it were another, compiled code that
a layer's attributes and forward do not name would be taken for plain operators."""

SCRIPTED_NODE = "DifferentiableGraphBackward"
"""How the names of the nodes end that TorchScript's executor makes. No thread found. If
it were another, a layer whose scripted code cannot be found would fail more often."""

SCRIPTED_TYPES = (
    torch.jit.ScriptModule,
    torch.jit.ScriptFunction,
    torch._C.ScriptMethod,
)
"""Modules, functions and methods of TorchScript; only of methods there is no public
type. No thread found."""

eval_frame_callback: Callable[[], object] = (
    torch._C._dynamo.eval_frame.get_eval_frame_callback
)
"""What compiles the frames that this thread begins; None if nothing does. A call that
``torch.compiler.disable`` hides from it takes ten calls more; to ask first takes none
in Python. No thread about a public form was found."""


def set_graphs_by_use(by_use: bool) -> None:
    """Try the graphs of a call by their last use, as torch does, or by their age.

    A recomputation may find another graph than its forward did where it is by use
    (#166926); #167038 brought the switch. Without it nothing is done.

    Args:
        by_use: Whether the one used last is tried first.
    """
    switch: Callable[[bool], None] | None
    switch = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if switch is not None:
        switch(by_use)


# ------------------------------------------------------------ operators, containers

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees every operator. Documented in torch's page on extending it (#110073), under this
private path alone."""

without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[Any]] = (
    _python_dispatch._disable_current_modes
)
"""For a while no such mode sees what runs. torch's compiler does its own bookkeeping in
it; no thread about a public form was found."""

pytree = _pytree
"""Takes nested containers apart and puts them together again, those of the user's that
are registered for it among them. #175082 offers ``torch.utils.pytree``, not in 2.13."""

overload_packet: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")
"""All overloads of an operator: the key of ``torch.utils.flop_counter.flop_registry``,
which is read in the same way there. No thread found."""

to_copy: Any = torch.ops.aten._to_copy.default
"""The operator of every conversion to another precision, as a dispatch mode sees it:
``Tensor.to`` is made of it. Part of the operators that torch.compile's backends are
given, so it can hardly change; no thread found."""

_aten: Any = torch.ops.aten

log_softmax_into: Any = _aten._log_softmax.out
"""What ``torch.nn.functional.cross_entropy`` runs on its logits, into memory that is
there. Among the operators that torch.compile's backends are given, as are the next
three, so they can hardly change; no thread about public forms was found."""

log_softmax_backward_into: Any = _aten._log_softmax_backward_data.out
"""The same for what gives their gradient."""

nll_loss: Any = _aten.nll_loss_forward.default
"""What it runs on that log-softmax; returns the weight of all rows that count, too."""

nll_loss_backward_into: Any = _aten.nll_loss_backward.grad_input
"""What gives the gradient of the log-softmax."""

# -------------------------------------------------------------------- accelerators

device_statistics: Callable[[int], Mapping[str, Any]] = (
    torch._C._accelerator_getDeviceStats
)
"""An allocator's numbers, nested, by a device's index: 11 µs in place of 136 for the
public ``torch.accelerator.memory_stats``, which flattens them (#152932 leaves the
nested form out until a user needs it)."""


def allocator_settings() -> str:
    """Return the allocator's settings, those made at run time too; "" if not known.

    From the work on one configuration for all accelerators (#149601, #165291).
    """
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return "" if settings is None else str(settings())


def empty_host_cache() -> None:
    """Unpin what the allocator of pinned memory keeps for whoever asks next.

    ``torch.accelerator.empty_host_cache`` is public where torch has it (#171270), and
    not to be called on devices without such an allocator (#197561). Before it CUDA had
    its own (#134332). Where neither is there nothing is unpinned.
    """
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    empty = empty or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


# --------------------------------------------------------------------- many processes


def group_timeout(group: Any) -> timedelta | None:
    """Return how long collectives of a group wait; None if not known.

    The argument is public, what was given is not since #56531. Of several backends the
    longest counts.
    """
    found = []
    with contextlib.suppress(AttributeError, RuntimeError):
        for device in group._device_types:
            found.append(group._get_backend(device).options._timeout)
    return max(found, default=None)


def is_managed_by_fsdp(module: nn.Module) -> bool:
    """Whether a module's own parameters are in a group of ``fully_shard``.

    Set for torch.compile, which reads it, too; no thread found. Without it sharded
    parameters would be taken for those of tensor parallelism.
    """
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters of a module that ``fully_shard`` was called on.

    Read of them are ``fsdp_params`` (with ``sharded_param``, which the optimizer has,
    and where gradients wait that are not reduced yet), ``mesh_info``, ``mp_policy``,
    ``reduce_grads`` and ``_reshard_after_forward``. Public is what sets these; no
    thread about a public way to read them was found. Seen in 2.9 (one group a module)
    and in 2.13 (several).

    Args:
        module: The module.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def reshards_after_forward(group: Any) -> bool:
    """Whether one of `fsdp_groups` gives its whole parameters back after a call."""
    return bool(group._reshard_after_forward)


def host_offload_of(group: Any) -> torch.device | None:
    """Return the device of one of `fsdp_groups` whose parameters wait on the host.

    None where they do not. The policy is public, to ask a group for it is not.
    """
    policy: object = getattr(group, "offload_policy", None)
    is_offloaded = type(policy).__name__ == "CPUOffloadPolicy"
    device: torch.device | None = group.device if is_offloaded else None
    return device


def shards_over(group: Any) -> int:
    """Return over how many ranks one of `fsdp_groups` is sharded."""
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def leaves_resharding_to_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called without ``reshard_after_forward``.

    Then the outermost module keeps them, from its first forward on, and all others do
    not. Public is the argument alone; seen in 2.13.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    return bool(getattr(state, "_auto_reshard_after_forward", False))


def waits_unreduced(fsdp_param: Any) -> bool:
    """Whether the gradient of a parameter of FSDP's waits, whole, for a later step."""
    whole = getattr(fsdp_param, "_unsharded_param", None)
    return fsdp_param.unsharded_accumulated_grad is not None or (
        whole is not None and whole.grad is not None
    )


def sharded_weights(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Return the sharded weights of the groups of a module of ``fully_shard``.

    Each with the module that it is a weight of, and its name there. In the module's own
    table whole weights take their places for a while; these stay, and an optimizer
    changes them. No thread about a public way was found; seen in 2.9 and 2.13.
    """
    return [
        (each._module_info.module, each._module_info.param_name, each.sharded_param)
        for group in fsdp_groups(module)
        for each in group.fsdp_params
    ]


_FORBIDDING: Any = torch.autograd.graph.disable_saved_tensors_hooks
_FORBIDS = _FORBIDDING.__wrapped__.__code__


def is_from_forbidden_hooks(error: BaseException) -> bool:
    """Whether an error is that of code that forbids hooks where some are pushed.

    Its words are up to who forbids them, as transforms of ``torch.func`` do; so it is
    known by where it was raised. If that changed it would reach the user as it does
    under ``torch.utils.checkpoint``. No thread about a public form was found.

    Args:
        error: What was raised.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is _FORBIDS


def is_dual_level_open() -> bool:
    """Whether tensors may have tangents now: a level of forward-mode differentiation.

    Public is what opens one; no thread about a way to ask was found.
    """
    return bool(forward_ad._current_level >= 0)


def are_parametrizations_cached() -> bool:
    """Whether ``parametrize.cached()`` is on: each weight is computed once, then.

    Public is what turns it on; no thread about a way to ask was found.
    """
    return bool(parametrize._cache_enabled)


def cached_parametrizations() -> dict[tuple[int, str], Any]:
    """Return what ``parametrize.cached()`` has computed so far, to forget some of it.

    Public is what turns it on; no thread about a way to ask was found.
    """
    return parametrize._cache
