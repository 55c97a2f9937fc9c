"""Where a causal language model keeps its layers, MLP output matrices, final norm and head."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

HEAD = "head"
"""How an edit of the LM head is asked for, where a layer number is expected otherwise."""

_LAYER_LISTS = ("layers", "h", "decoder.layers")
_MLP_OUTPUTS = ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.fc2")
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "decoder.final_layer_norm")


class UnknownArchitectureError(ValueError):
    """The model has no part of a known name where one is needed."""


class Anatomy:
    """The parts of a model that the edit touches.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model of the Llama, Qwen2, GPT-2 or GPT-NeoX kind, or one with the same names of parts.

    Attributes
    ----------
    layers : nn.ModuleList
    norm : nn.Module
        The final norm.
    head : nn.Module
        The LM head, weight of shape (vocab, hidden).

    Raises
    ------
    UnknownArchitectureError
        If a part isn't found; the message lists the names that were tried.
    ValueError
        If the model is in training mode.
    """

    def __init__(self, model: nn.Module):
        if model.training:
            raise ValueError(f"{type(model).__name__} is in training mode, where dropout makes its keys random: call eval() first")
        self.model = model
        self.base = getattr(model, getattr(model, "base_model_prefix", ""), model)
        self.layers = self._find(_LAYER_LISTS, "list of layers")
        self.norm = self._find(_FINAL_NORMS, "final norm")
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise UnknownArchitectureError(f"{type(model).__name__} has no LM head (get_output_embeddings() is None)")
        self._names = {module: name for name, module in model.named_modules()}

    def _find(self, paths: tuple[str, ...], what: str) -> nn.Module:
        found = next((part for path in paths if (part := _part(self.base, path)) is not None), None)
        if found is None:
            raise UnknownArchitectureError(f"{type(self.model).__name__} has no {what} of a known name ({', '.join(paths)})")
        return found

    def mlp_output(self, layer: int) -> nn.Module:
        """The MLP output module of a layer: ``down_proj`` or what stands for it.

        Raises
        ------
        IndexError
            If there is no such layer.
        UnknownArchitectureError
            If the layer has no MLP output of a known name.
        """
        self.check_layer(layer)
        found = next((part for path in _MLP_OUTPUTS if (part := _part(self.layers[layer], path)) is not None), None)
        if found is None:
            raise UnknownArchitectureError(
                f"layer {layer} of {type(self.model).__name__} has no MLP output of a known name ({', '.join(_MLP_OUTPUTS)})"
            )
        return found

    def edited(self, where: int | str) -> nn.Module:
        """The module whose weight an edit changes, for a layer number or :data:`HEAD`."""
        return self.head if where == HEAD else self.mlp_output(where)

    def check_weight(self, where: int | str) -> None:
        """Raise ValueError if the weight that an edit would change has NaN or infinite entries; see :meth:`edited` for the rest."""
        module = self.edited(where)
        if not torch.isfinite(module.weight).all():
            raise ValueError(f"{self.name(module)} has NaN or infinite weights")

    def check_layer(self, layer: int) -> None:
        """Raise IndexError unless the model has this layer."""
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < len(self.layers):
            raise IndexError(f"unknown layer {layer!r}: {type(self.model).__name__} has layers 0 to {len(self.layers) - 1}, and '{HEAD}'")

    def name(self, module: nn.Module) -> str:
        """Dotted name of a module in the model."""
        return self._names[module]


def _part(module: nn.Module, path: str) -> nn.Module | None:
    return reduce(lambda found, name: getattr(found, name, None), path.split("."), module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module keeps its weight as (in, out), like GPT-2's Conv1D, and not as (out, in), like nn.Linear."""
    return type(module).__name__ == "Conv1D"


def weight_view(module: nn.Module) -> Tensor:
    """The weight W as (out, in), whatever the module's layout: a view, so that writing to it edits the module."""
    weight = module.weight.detach()
    return weight.T if is_transposed(module) else weight


def is_tied(model: nn.Module) -> bool:
    """Whether the LM head shares its weight with the input embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def untie(model: nn.Module) -> None:
    """Give a tied LM head a weight of its own and say so in the config, so that saving and reloading keep both."""
    if is_tied(model):
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        model.config.tie_word_embeddings = False


def tie(model: nn.Module) -> None:
    """Undo :func:`untie`: the LM head takes the input embedding's weight again."""
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    model.config.tie_word_embeddings = True


def unembedding(model: nn.Module) -> Tensor:
    """Weight of the LM head, shape (vocab, hidden)."""
    return model.get_output_embeddings().weight.detach()
