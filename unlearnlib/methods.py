"""Every unlearning method of the tables behind one call: ``method(model, tokenizer, forget, retain, settings)``, a model or an edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from . import baselines
from .corpora import as_examples
from .examples import Example
from .grom import Edit, FitData, FitSettings


@dataclass(frozen=True)
class GromSettings:
    """Settings of a GROM edit of questions and answers, or of texts.

    Attributes
    ----------
    fit : FitSettings
    template : {"auto", "chat", "plain"}
    system : str, optional
        See :func:`~unlearnlib.examples.encode`.
    """

    fit: FitSettings
    template: str = "auto"
    system: str | None = None


def grom(
    model: nn.Module,
    tokenizer,
    forget: Sequence[dict | Example],
    retain: Sequence[dict | Example],
    settings: GromSettings,
    *,
    progress: bool = False,
) -> Edit:
    """Fit a GROM edit on whole answers, or on every token of texts, teacher-forced.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Left as it was.
    tokenizer : transformers.PreTrainedTokenizerBase
    forget, retain : sequence of dict or Example
        With the text fields ``question`` and ``answer``, or :func:`~unlearnlib.corpora.windows` of text.
    settings : GromSettings
    progress : bool

    Returns
    -------
    Edit
    """
    encoding = {"template": settings.template, "system": settings.system}
    sets = (as_examples(tokenizer, rows, **encoding) for rows in (forget, retain))
    return FitData(model, *sets, progress=progress).fit(settings.fit)


GROM = ("grom", "grom_head", "grom_both")
"""GROM on a band of MLP outputs, on the LM head, and on both."""

METHODS: dict[str, Callable] = dict.fromkeys(GROM, grom) | baselines.METHODS
"""By the name of a table's row."""


@contextmanager
def outcome(model: nn.Module, result: Edit | nn.Module) -> Iterator[nn.Module]:
    """The unlearned model that a method's result stands for.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The one that was unlearned. An edit is in its weights within the context only.
    result : Edit or transformers.PreTrainedModel

    Yields
    ------
    transformers.PreTrainedModel
    """
    if isinstance(result, Edit):
        with result.applied(model):
            yield model
    else:
        yield result
