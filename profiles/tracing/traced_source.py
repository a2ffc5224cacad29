"""A user's module without memory for its parameters, with its batches and its loss.

The tracer and the executor run it. A Hugging Face model is the class that its config.json names in
`architectures`. A function package.module:function returns a module (token ids in, logits out),
(module, batch) or (module, batch, loss): see `TracedWorkload`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves, tree_map

from parplan.profiles.errors import ConfigError, did_you_mean
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.stack import AttentionKernel
from parplan.profiles.tracing.deferred import Deferred
from parplan.profiles.tracing.partly_trained import train_in_part
from parplan.profiles.tracing.random_batches import (
    IDS,
    TARGETS,
    drawn_batch,
    next_token_batch,
    next_token_loss,
)
from parplan.profiles.tracing.user_code import explained_user_errors
from parplan.profiles.units import GIB, format_bytes

ATTENTION = {AttentionKernel.FLASH: "sdpa", AttentionKernel.UNFUSED: "eager"}  # transformers' names
RUN_ONLY = (
    "model_type",
    "dtype",
    "torch_dtype",
    "use_cache",
    "transformers_version",
    "architectures",
    "_attn_implementation",
)
MAKING = (
    "transformers cannot make the model: it",
    "check the config.json, and the version of transformers",
)
_CAUSAL = "ForCausalLM"  # ending of a class of causal language models
_FILE_DTYPES = ("dtype", "torch_dtype")
TOKENS, SAMPLES = "tokens", "samples"

MOST_HELD_BYTES = 4 * GIB  # assumed bound on buffers, which every process holds in full
_OF_TORCH = ("_parameters", "_buffers", "_modules")  # attributes of torch in a module
_CANNOT: tuple[tuple[Callable[[nn.Module], bool], str, str], ...] = (
    (
        lambda part: isinstance(part, torch.jit.ScriptModule),
        "is TorchScript, whose calls of torch cannot be seen",
        "give the module that was scripted",
    ),
    (
        lambda part: type(part).__name__ == "OptimizedModule",
        "is compiled, and its calls of torch cannot be seen",
        "give the module that was compiled",
    ),
    (
        lambda part: isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse,
        "has sparse gradients, which are not reduced over ranks",
        "make it with sparse=False",
    ),
    (
        lambda part: isinstance(part, nn.SyncBatchNorm),
        "asks all ranks for their batch, which no single process does",
        "use BatchNorm",
    ),
    (
        lambda part: isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel),
        "copies the module to devices by itself",
        "give the module inside",
    ),
)

Batch = dict[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWorkload:
    """A module with its batches and loss.

    module    its parameters are on meta; its buffers have values
    batch     size -> tensors by name, batch dim first, drawn with torch's global generator
    loss_of   (module, batch) -> the scalar mean loss, also inside `stand_ins`
    unit      TOKENS for sequences of `seq_length` tokens, or SAMPLES (then seq_length is 1)
    """

    name: str
    source: ModuleSource
    module: nn.Module
    batch: Callable[[int], Batch]
    loss_of: Callable[[nn.Module, Batch], Any]
    unit: str
    seq_length: int


def open_workload(
    source: ModuleSource,
    *,
    seq_length: int,
    attention: AttentionKernel = AttentionKernel.FLASH,
    deferred: Deferred | None = None,
) -> TracedWorkload:
    """Opens the module of `source` in training mode.

    Sequences have `seq_length` tokens if the module reads tokens. `deferred` logs the computations
    of parameter values, for later materialization of some of them; parameters that are small or
    were made elsewhere have their values.

    Raises ConfigError for a missing function or one that returns something else, and for
    transformers missing or without that model.
    """
    making = _Making(deferred or Deferred())
    opener = _hugging_face if source.huggingface is not None else _of_factory
    return opener(source, seq_length, attention, making)


@dataclass(frozen=True, slots=True)
class _Making:
    """Makes a module without memory for large tensors; `made` are its parameters by id."""

    deferred: Deferred
    made: dict[int, nn.Parameter] = field(default_factory=dict)

    def __call__(self, make: Callable[[], T]) -> T:
        with self.deferred, registered_parameters() as parameters:
            made = make()
        self.made.update(parameters)
        return made

    def settle(self, module: nn.Module) -> nn.Module:
        """Gives values to all tensors except parameters.

        Raises ConfigError for parts that cannot be traced or that the executor does not train.
        """
        for name, part in module.named_modules():
            for cannot, why, hint in _CANNOT:
                if cannot(part):
                    raise ConfigError(
                        f"module: {name or 'it'} ({type(part).__name__}) {why}", hint=hint
                    )
        give_values(module, self.deferred)
        for name, parameter in module.named_parameters():
            if parameter.ndim == 0 or not parameter.numel():
                what = "empty" if parameter.ndim else "a scalar"
                raise ConfigError(
                    f"module: parameter {name} is {what}, of which ranks cannot hold parts",
                    hint="leave it out" if parameter.ndim else "make it of shape [1]",
                )
            if parameter.dtype is not torch.float32:
                raise ConfigError(
                    f"module: parameter {name} is {parameter.dtype}, it must be fp32",
                    hint="let the function make fp32; the plan's precision decides "
                    "what it computes in",
                )
        return module.train()


def give_values(module: nn.Module, deferred: Deferred) -> None:
    """Gives values to buffers and other tensors that the module holds.

    Raises ConfigError for more bytes than every process should hold.
    """

    def lacks(leaf: Any) -> bool:
        return (
            isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and deferred.knows(leaf)
        )

    owners = [owner for part in module.modules() for owner in (part._buffers, part.__dict__)]
    holders = [
        (owner, name, value)
        for owner in owners
        for name, value in owner.items()
        if name not in _OF_TORCH and any(lacks(leaf) for leaf in tree_leaves(value))
    ]
    held = sum(
        {
            id(leaf): leaf.nbytes
            for *_, value in holders
            for leaf in tree_leaves(value)
            if lacks(leaf)
        }.values()
    )
    if held > MOST_HELD_BYTES:
        raise ConfigError(
            f"module: its buffers are {format_bytes(held)}, every process holds all of them, "
            f"{format_bytes(MOST_HELD_BYTES)} at most",
            hint="compute them in the forward pass, or make them parameters",
        )
    for owner, name, value in holders:
        owner[name] = tree_map(
            lambda leaf: deferred.value(leaf, deferred.seed) if lacks(leaf) else leaf, value
        )


@contextlib.contextmanager
def registered_parameters() -> Iterator[dict[int, nn.Parameter]]:
    """Collects the parameters that modules register inside, by id.

    Raises ConfigError for one whose size only a forward pass decides.
    """
    register = nn.Module.register_parameter
    parameters: dict[int, nn.Parameter] = {}

    def noted(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"module: {type(module).__name__} makes its {name} in the first forward pass",
                hint="give sizes to the constructor, as nn.Linear instead of "
                "nn.LazyLinear has them",
            )
        if parameter is not None:
            parameters[id(parameter)] = parameter
        register(module, name, parameter)

    nn.Module.register_parameter = noted  # type: ignore[method-assign,assignment]
    try:
        yield parameters
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def import_factory(factory: str) -> Callable[[], object]:
    """Imports the function that package.module:function names. Raises ConfigError."""
    package, _, name = factory.partition(":")
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name and not f"{package}.".startswith(f"{error.name}."):
            raise  # the package exists and lacks another one
        raise ConfigError(
            f"module: there is no {error.name} to import for {factory}",
            hint="run from the folder that holds it, or put that folder on PYTHONPATH "
            "and add --trust-module",
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        problem = f"has no {name}" if function is None else f"has {name}, which is not callable"
        raise ConfigError(
            f"module: {package} {problem}",
            hint="name a function without arguments: --module package.module:function",
        )
    made: Callable[[], object] = function
    return made


def _of_factory(
    source: ModuleSource, seq_length: int, attention: AttentionKernel, making: _Making
) -> TracedWorkload:
    function = import_factory(source.factory or "")
    with explained_user_errors(f"{source.factory}()"):
        made = making(function)
    parts = made if isinstance(made, tuple) else (made,)
    module, *functions = parts
    if (
        not isinstance(module, nn.Module)
        or len(functions) > 2
        or not all(callable(each) for each in functions)
    ):
        returned = type(made).__name__
        if isinstance(made, tuple):
            returned = f"({', '.join(type(part).__name__ for part in parts)})"
        raise ConfigError(
            f"module: {source.factory} returned {returned}, it must return a torch.nn.Module",
            hint="return module, (module, batch) or (module, batch, loss)",
        )
    _check_parameters(module, source, making)
    making.settle(module)
    name = type(module).__name__
    if not functions:
        return TracedWorkload(
            name=name,
            source=source,
            module=module,
            batch=next_token_batch(module, seq_length),
            loss_of=_next_token,
            unit=TOKENS,
            seq_length=seq_length,
        )
    loss_of = _with_loss(module, functions[1]) if len(functions) > 1 else _own_loss
    return TracedWorkload(
        name=name,
        source=source,
        module=module,
        batch=_checked(functions[0], source),
        loss_of=loss_of,
        unit=SAMPLES,
        seq_length=1,
    )


def _check_parameters(module: nn.Module, source: ModuleSource, making: _Making) -> None:
    """Raises ConfigError for large parameters made elsewhere; small copies need no module."""
    for name, parameter in module.named_parameters():
        if (
            not parameter.is_meta
            and id(parameter) not in making.made
            and parameter.nbytes >= making.deferred.at_least_bytes
        ):
            raise ConfigError(
                f"module: parameter {name} of {source.factory} was made before the call, it must "
                "be made in it",
                hint="make the module inside of the function",
            )


def _checked(batch: Callable[[int], Any], source: ModuleSource) -> Callable[[int], Batch]:
    def made(size: int) -> Batch:
        with explained_user_errors(f"batch({size}) of {source.factory}"):
            values = batch(size)
        if not isinstance(values, Mapping) or not all(
            isinstance(value, Tensor) for value in values.values()
        ):
            raise ConfigError(
                f"module: batch({size}) of {source.factory} gave {type(values).__name__}, it must "
                "give a dict of tensors"
            )
        for key, value in values.items():
            if value.is_meta:
                raise ConfigError(
                    f"module: {key} of batch({size}) comes from a tensor that was made beside the "
                    "module and has no values",
                    hint="make what batches are drawn from inside of the batch function",
                )
            if value.ndim == 0 or value.shape[0] != size:
                raise ConfigError(
                    f"module: {key} in batch({size}) of {source.factory} is {list(value.shape)}, "
                    f"its first dim must be {size}"
                )
        return dict(values)

    return made


def _next_token(module: nn.Module, batch: Batch) -> Any:
    output = module(batch[IDS])
    return next_token_loss(getattr(output, "logits", output), batch[TARGETS])


def _own_loss(module: nn.Module, batch: Batch) -> Any:
    output = module(**batch)
    return getattr(output, "loss", output)


def _with_loss(
    module: nn.Module, loss: Callable[[Any, Batch], Any]
) -> Callable[[nn.Module, Batch], Any]:
    """Returns a loss function that passes the module only the batch keys its forward takes."""
    taken = inspect.signature(module.forward).parameters
    every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())

    def loss_of(module: nn.Module, batch: Batch) -> Any:
        return loss(
            module(**{key: value for key, value in batch.items() if every or key in taken}), batch
        )

    return loss_of


def _hugging_face(
    source: ModuleSource, seq_length: int, attention: AttentionKernel, making: _Making
) -> TracedWorkload:
    values = _in_fp32(source.huggingface or {})
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"module: it is a Hugging Face model, and transformers is not installed ({error})",
            hint="pip install transformers",
        ) from None
    require_names(values)
    require_known_type(values, transformers.CONFIG_MAPPING)
    with explained_user_errors(MAKING[0], hint=MAKING[1]):
        config = transformers.AutoConfig.for_model(
            values["model_type"], **{key: values[key] for key in values if key not in RUN_ONLY}
        )
        _settle(config)
        kind = _model_class(transformers, values)
        if attention is AttentionKernel.FLASH and not getattr(kind, "_supports_sdpa", True):
            raise ConfigError(
                f"module: transformers has no fused attention for {kind.__name__}",
                hint="use --attention unfused",
            )
        module = making(
            lambda: _hugging_face_module(kind, config, ATTENTION[attention], source.fine_tuning)
        )
    batch, unit = drawn_batch(module, config, seq_length)
    return TracedWorkload(
        name=_name(values, config),
        source=source,
        module=making.settle(module),
        batch=batch,
        loss_of=_own_loss,
        unit=unit,
        seq_length=seq_length if unit == TOKENS else 1,
    )


def _hugging_face_module(
    kind: Any, config: Any, attention: str, tuning: FineTuning | None
) -> nn.Module:
    made: nn.Module = kind._from_config(config, attn_implementation=attention)
    return made if tuning is None else train_in_part(made, tuning, config.num_hidden_layers)


def require_names(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a config.json whose model_type or architectures are not names."""
    kind, classes = values.get("model_type"), values.get("architectures")
    if not isinstance(kind, str):
        raise ConfigError(
            f"module: model_type is {kind!r}, it must be a name such as 'bert'",
            hint="correct model_type in the config.json",
        )
    if classes is not None and not (
        isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
    ):
        raise ConfigError(
            f"module: architectures is {classes!r}, it must be a list of names",
            hint="correct architectures in the config.json",
        )


def require_known_type(values: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ConfigError for a config.json of a model_type that transformers does not know."""
    kind = str(values["model_type"])
    if kind not in known:
        raise ConfigError(
            f"module: model_type is {kind!r}, which is none of the {len(known)} that the installed "
            "transformers knows",
            hint=did_you_mean(kind, known)
            or "python -c 'import transformers; print(*transformers.CONFIG_MAPPING)' lists them",
        )


def _in_fp32(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json and its nested configs, without the dtype of weight files."""
    kept = {key: value for key, value in values.items() if key not in _FILE_DTYPES}
    return {
        key: _in_fp32(value) if isinstance(value, Mapping) and key.endswith("_config") else value
        for key, value in kept.items()
    }


def _settle(config: Any) -> None:
    """Adds settings that training needs: no cache, and the token from which a decoder starts."""
    config.use_cache = False
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = (
            getattr(config, "pad_token_id", None) or getattr(config, "bos_token_id", None) or 0
        )
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "pad_token_id", None) is None
    ):
        config.pad_token_id = config.decoder_start_token_id


def _model_class(transformers: Any, values: Mapping[str, Any]) -> Any:
    """The first class in `architectures`, else the family's causal language model.

    A causal language model by a name that transformers does not have, such as the MPTForCausalLM of
    a repository's own code, is that of the family too.
    """
    named = (values.get("architectures") or [None])[0]
    model = None if named is None else getattr(transformers, named, None)
    if named is None or (model is None and named.endswith(_CAUSAL)):
        return _causal_class(transformers, values)
    if not isinstance(model, type) or not issubclass(model, transformers.PreTrainedModel):
        raise ConfigError(
            f"module: transformers has no model {named}, which architectures names",
            hint="check architectures, and the version of transformers",
        )
    return model


def _causal_class(transformers: Any, values: Mapping[str, Any]) -> Any:
    """The causal language model of a family. Raises ConfigError for a family without one."""
    known = transformers.AutoModelForCausalLM._model_mapping
    config = type(transformers.AutoConfig.for_model(values.get("model_type")))
    if config not in known:
        raise ConfigError(
            f"module: transformers has no causal language model of {values.get('model_type')}",
            hint='name the class in architectures, as "architectures": ["BertForMaskedLM"]',
        )
    return known[config]


def _name(values: Mapping[str, Any], config: Any) -> str:
    return str(values.get("_name_or_path") or "").rstrip("/").rpartition("/")[2] or str(
        config.model_type
    )
