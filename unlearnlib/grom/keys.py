"""Keys: the inputs of an MLP output matrix, or of the LM head, at the positions that predict an answer token."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..examples import Batch
from .anatomy import Anatomy


class _Stop(Exception):
    """Not an error: it ends a forward pass whose rest isn't needed."""


@torch.no_grad()
def collect_keys(model: nn.Module, batches: Sequence[Batch], where: int | str, *, progress: bool = False) -> Iterator[Tensor]:
    """Keys of one matrix, a forward pass of the model for each batch that ends where the matrix would be applied.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    batches : sequence of Batch
    where : int or "head"
        Layer whose MLP output matrix is meant, or the LM head (keys are then the normed final hidden states).
    progress : bool
        Whether to show a progress bar.

    Yields
    ------
    Tensor, shape (gold, n)
        Keys of one batch, in the order of its `gold`.
    """
    module = Anatomy(model).edited(where)
    for batch in tqdm(batches, desc=f"keys of {where}", disable=not progress, leave=False):
        with _capturing_input(module) as captured:
            _run(model, batch)
        yield captured[0][batch.rows, batch.columns]


class BandStates:
    """Hidden states on their way through a band of layers, so that each layer of the model is run once and not once a matrix.

    One forward pass of the layers below the band gives the states that enter it. :meth:`keys` runs the band's current layer up to its
    MLP output matrix; once that is edited, :meth:`advance` sends the states through the layer, edit included, to the next one.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    batches : sequence of Batch
    layers : sequence of int
        The band, first to last, contiguous.
    dtype : torch.dtype, optional
        What states are kept in, the model's own type by default. bfloat16 halves the memory of a float32 model and costs exactness.
    folder : path, optional
        Keep the states in files in a temporary folder in there, instead of in memory. It is removed with this object.
    progress : bool
        Whether to show progress bars.

    Notes
    -----
    Ours; the official code re-runs the whole model for every layer. Both give the same keys. Layers may take any keyword arguments and
    return a tensor or a tuple: each layer's own arguments are recorded while the model runs.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        layers: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        folder: str | Path | None = None,
        progress: bool = False,
    ):
        self.anatomy, self.batches, self.progress = Anatomy(model), list(batches), progress
        self.layers = check_band(self.anatomy, layers)
        self.current = self.layers[0]
        self._dtype = dtype
        self._folder = None if folder is None else tempfile.TemporaryDirectory(dir=folder, prefix="states-")
        self._arguments: list[dict[int, tuple[tuple, dict[str, Any]]]] = []
        self._returns_tuple = self._probe()
        self._states = [self._store(self._enter(batch), i) for i, batch in enumerate(self._bar(self.batches, "states entering the band"))]

    def copy(self) -> BandStates:
        """Another view of the same states, that advances by itself: for trying several edits of one band."""
        if self._folder is not None:
            raise ValueError("states kept on disk cannot be copied")
        twin = object.__new__(BandStates)
        twin.__dict__ = self.__dict__ | {"_states": list(self._states)}
        return twin

    @torch.no_grad()
    def keys(self, layer: int) -> Iterator[Tensor]:
        """Keys of the band's current layer, batch by batch.

        Yields
        ------
        Tensor, shape (gold, n)

        Raises
        ------
        ValueError
            If another layer is the current one.
        """
        self._expect(layer)
        module = self.anatomy.mlp_output(layer)
        for i, batch in enumerate(self._bar(self.batches, f"keys of layer {layer}")):
            with _capturing_input(module) as captured:
                self._run_layer(i)
            yield captured[0][batch.rows, batch.columns]

    @torch.no_grad()
    def advance(self, layer: int) -> None:
        """Send the states through the current layer, as it is now, to the next one.

        Raises
        ------
        ValueError
            If another layer is the current one.
        """
        self._expect(layer)
        for i in self._bar(range(len(self.batches)), f"through layer {layer}"):
            self._states[i] = self._store(_hidden(self._run_layer(i)), i)
        self.current += 1

    def _expect(self, layer: int) -> None:
        if layer != self.current or layer not in self.layers:
            raise ValueError(f"the states stand before layer {self.current} of the band {self.layers}, not before layer {layer}")

    def _bar(self, items, what: str):
        return tqdm(items, desc=what, disable=not self.progress, leave=False)

    def _run_layer(self, i: int):
        args, kwargs = self._arguments[i][self.current]
        state = self._load(i)
        layer = self.anatomy.layers[self.current]
        return layer(state, *args[1:], **kwargs) if args else layer(**kwargs | {"hidden_states": state})

    def _probe(self) -> dict[int, bool]:
        """Which layers of the band return a tuple: seen by running the model once on one example."""
        shortest = min(self.batches, key=lambda batch: batch.input_ids.shape[1])
        found: dict[int, bool] = {}

        def note(layer: int, output: Any) -> None:
            found[layer] = isinstance(output, tuple)
            if layer == self.layers[-1]:
                raise _Stop

        with ExitStack() as stack:
            for layer in self.layers:
                module = self.anatomy.layers[layer]
                hook = module.register_forward_hook(lambda _module, _inputs, output, layer=layer: note(layer, output))
                stack.callback(hook.remove)
            _run(self.anatomy.base, shortest.first())
        return found

    @torch.no_grad()
    def _enter(self, batch: Batch) -> Tensor:
        """Run the layers below the band; the band's own only note their arguments and pass their input on."""
        arguments: dict[int, tuple[tuple, dict[str, Any]]] = {}

        def record(layer: int):
            def forward(*args, **kwargs):
                arguments[layer] = (args, kwargs)
                if layer == self.layers[-1]:
                    raise _Stop
                state = args[0] if args else kwargs["hidden_states"]
                return (state,) if self._returns_tuple[layer] else state

            return forward

        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(_replaced_forward(self.anatomy.layers[layer], record(layer)))
            _run(self.anatomy.base, batch)
        args, kwargs = arguments[self.layers[0]]
        state = args[0] if args else kwargs["hidden_states"]
        # Keep the other arguments only: the recorded states would hold memory, or be stale.
        self._arguments.append(
            {
                layer: ((None, *args[1:]) if args else (), {k: v for k, v in kwargs.items() if k != "hidden_states"})
                for layer, (args, kwargs) in arguments.items()
            }
        )
        return state

    def _store(self, state: Tensor, i: int):
        state = state if self._dtype is None else state.to(self._dtype)
        if self._folder is None:
            return state
        path = Path(self._folder.name) / f"{i}.safetensors"
        save_file({"state": state.contiguous()}, path)
        return path

    def _load(self, i: int) -> Tensor:
        stored = self._states[i]
        state = load_file(stored)["state"] if isinstance(stored, Path) else stored
        reference = self.anatomy.head.weight
        return state.to(device=reference.device, dtype=reference.dtype)


def check_band(anatomy: Anatomy, layers: Sequence[int]) -> tuple[int, ...]:
    """A contiguous band of existing layers, each with a known MLP output, as a tuple.

    Raises
    ------
    IndexError
        If a layer doesn't exist.
    ValueError
        If the band is empty or not contiguous and increasing.
    UnknownArchitectureError
        If a layer has no MLP output of a known name.
    """
    band = tuple(layers)
    if not band:
        raise ValueError("the band has no layers")
    for layer in band:
        anatomy.mlp_output(layer)
    if band != tuple(range(band[0], band[0] + len(band))):
        raise ValueError(f"a band must be contiguous and increasing, got {list(band)}")
    return band


def _hidden(output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def _run(model: nn.Module, batch: Batch) -> None:
    with suppress(_Stop):
        model(**batch.inputs(), use_cache=False)


@contextmanager
def _capturing_input(module: nn.Module) -> Iterator[list[Tensor]]:
    """Note the module's first input, then end the forward pass, which may be of one layer only."""
    captured: list[Tensor] = []

    def stop(_module, inputs):
        captured.append(inputs[0])
        raise _Stop

    hook = module.register_forward_pre_hook(stop)
    try:
        yield captured
    except _Stop:
        pass
    finally:
        hook.remove()


@contextmanager
def _replaced_forward(module: nn.Module, forward) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
