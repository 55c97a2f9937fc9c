"""Parameters as plain dictionaries: their algebra, and the numerics that a derivative through training needs.

A point θ of parameter space is a ``dict[str, Tensor]``. Sums, differences and norms here are computed in float32 or wider whatever
the model's own dtype, since a difference of two bfloat16 models is mostly rounding.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

Parameters = Mapping[str, Tensor]


class MismatchError(ValueError):
    """Two sets of parameters, or a set and a model, don't fit; the message lists the names."""


def parameters_of(source: nn.Module | Parameters, only: Callable[[str], bool] | Iterable[str] | None = None) -> dict[str, Tensor]:
    """The parameters of a model or a mapping by name, detached, sharing memory with the source; tied ones appear once.

    Parameters
    ----------
    source : nn.Module or mapping of str to Tensor
        Where to take them from. In a mapping (a state dict, say) tensors that share their memory count as tied.
    only : callable or iterable of str, optional
        Which names to keep; a callable gets the name. All by default.

    Returns
    -------
    dict of str to Tensor
        A tied parameter has the name under which it comes first.

    Raises
    ------
    MismatchError
        If `only` names parameters that aren't there, or nothing is left.
    """
    named = source.named_parameters() if isinstance(source, nn.Module) else source.items()
    theta, seen = {}, set()
    for name, tensor in named:
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() == 0 or memory not in seen:
            theta[name] = tensor.detach()
            seen.add(memory)
    if only is not None:
        if not callable(only):
            wanted = set(only)
            if absent := sorted(wanted - theta.keys()):
                raise MismatchError(f"no such parameters (a tied one has its first name): {_listed(absent)}")
            only = wanted.__contains__
        theta = {name: tensor for name, tensor in theta.items() if only(name)}
    if not theta:
        raise MismatchError("no parameters are left: `only` keeps none of the names, or the source is empty")
    return theta


def check_alike(**sets: Parameters) -> None:
    """Check that all sets have the same names and shapes.

    Raises
    ------
    MismatchError
        Listing what is missing, what is in excess, and which shapes differ, by the name of the set.
    """
    (reference_name, reference), *others = sets.items()
    for set_name, other in others:
        missing = [name for name in reference if name not in other]
        excess = [name for name in other if name not in reference]
        shapes = [
            f"{name} {tuple(other[name].shape)} against {tuple(reference[name].shape)}"
            for name in reference
            if name in other and other[name].shape != reference[name].shape
        ]
        found = [("missing", missing), ("in excess", excess), ("of another shape", shapes)]
        if any(names for _, names in found):
            text = "; ".join(f"{what}: {_listed(names)}" for what, names in found if names)
            raise MismatchError(f"{set_name} doesn't match {reference_name}: {text}")


def _listed(names: list[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or as it is if it is wider already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def combine(*terms: tuple[float, Parameters]) -> dict[str, Tensor]:
    """The linear combination ``Σ cᵢ θᵢ`` in float32 or wider, summed in the order given.

    Parameters
    ----------
    *terms : (float, mapping of str to Tensor)
        Coefficients and sets of parameters with the same names and shapes.

    Returns
    -------
    dict of str to Tensor
        New tensors.

    Raises
    ------
    MismatchError
        If names or shapes differ.
    """
    check_alike(**{f"term {i}": theta for i, (_, theta) in enumerate(terms)})
    total = {name: coefficient * wide(tensor) for coefficient, theta in terms[:1] for name, tensor in theta.items()}
    for coefficient, theta in terms[1:]:
        total = {name: tensor + coefficient * wide(theta[name]) for name, tensor in total.items()}
    return total


def inner(a: Parameters, b: Parameters) -> float:
    """The Euclidean inner product of two sets of parameters, accumulated in float64."""
    check_alike(a=a, b=b)
    return sum(torch.dot(a[name].flatten().double(), b[name].flatten().double()).item() for name in a)


def norm(a: Parameters) -> float:
    """The Euclidean norm of a set of parameters, accumulated in float64."""
    return inner(a, a) ** 0.5


def cast_like(theta: Parameters, reference: Parameters) -> dict[str, Tensor]:
    """The parameters in the dtypes and on the devices of a reference set with the same names."""
    return {name: tensor.to(reference[name]) for name, tensor in theta.items()}


class _KeepFloat64(TorchFunctionMode):
    """Ignores requests to go from float64 down to float32, as transformers makes in norms, softmax and loss."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to and torch.float32 in args[1:]:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def bound(module: nn.Module, theta: Parameters, *, differentiable: bool = True) -> Callable:
    """The module as a function with the parameters θ in it: no dropout, and float64 throughout if θ is in float64.

    Left to themselves, transformers' RMSNorm and softmax round float64 to float32 on the way, which puts a derivative off by
    1e-3, and the fused attention kernels have no forward-mode derivative.

    Parameters
    ----------
    module : nn.Module
        Only lends its form and the parameters that θ lacks; tied ones stay tied.
    theta : mapping of str to Tensor
        The parameters.
    differentiable : bool
        Keep to attention that can be differentiated in forward mode.
    """
    double = all(p.dtype == torch.float64 for p in theta.values())

    def model(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(_evaluating(module))
            if double:
                stack.enter_context(_KeepFloat64())
            if differentiable:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            return functional_call(module, dict(theta), args, kwargs, tie_weights=True)

    return model


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


# ---------------------------------------------------------------------------------------------------------------------------
# Files: one safetensors file with its description, as JSON, in the header


def save_tensors(path: str | os.PathLike, tensors: Parameters, description: Mapping[str, Any]) -> None:
    """Write tensors and a JSON description as one safetensors file: whole, or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        # A copy apiece: safetensors refuses tensors that share memory or aren't contiguous.
        plain = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        save_file(plain, temporary, metadata={"description": json.dumps(dict(description))})
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_tensors(path: str | os.PathLike, form: str, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote; `form` is what the description's field ``format`` has to say.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        Naming the file, if it is damaged or of another format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            description = json.loads((file.metadata() or {}).get("description", "{}"))
            if description.get("format") != form:
                raise ValueError(f"{path}: field format is {description.get('format')!r}, expected {form!r}")
            return {name: file.get_tensor(name) for name in file.keys()}, description  # noqa: SIM118 (not a mapping)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: damaged: {error}") from None


def digest(*parts: Any) -> str:
    """A fingerprint (SHA-256) of tensors by their bytes and of other things by their ``repr``, through mappings and lists."""
    state = hashlib.sha256()

    def feed(part: Any) -> None:
        if isinstance(part, Tensor):
            state.update(f"{part.dtype}{tuple(part.shape)}".encode())
            state.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, Mapping):
            for key in part:
                state.update(f"{key!r}:".encode())
                feed(part[key])
        elif isinstance(part, (list, tuple)):
            for entry in part:
                feed(entry)
        else:
            state.update(f"{part!r};".encode())

    feed(parts)
    return state.hexdigest()
