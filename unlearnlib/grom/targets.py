r"""Target shifts D of the forget outputs, factored as :math:`D = U S` with one column of the basis U a distinct gold token."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

LOW_SPECIFICITY = 0.2
"""Mean α of the forget tokens under which a suppression edit is warned about."""


class NoSpecificTokensError(ValueError):
    """Every gold token of the forget set is as frequent in the retain set: α ≡ 0, and the edit would do nothing."""


@dataclass(frozen=True)
class Targets:
    r"""Targets with one non-zero coordinate a column: column j is ``value[i] * basis[:, i]``, i the code of its gold token.

    Attributes
    ----------
    tokens : Tensor of int64, shape (k,)
        The gold token that each basis column stands for; empty for a target that doesn't depend on tokens (then k = 1).
    values : Tensor, shape (k,), float64
        Coefficient of each basis column: :math:`-\beta\alpha_v`, or c.
    basis : Tensor, shape (m, k), float64, or None
        U. None stands for the unit vectors of the rows `tokens`, the LM head's case, which are never materialised.
    """

    tokens: Tensor
    values: Tensor
    basis: Tensor | None

    @property
    def rank(self) -> int:
        """Number k of basis columns: the largest rank that the edit can have."""
        return len(self.values)

    def coordinates(self, gold: Tensor) -> tuple[Tensor, Tensor]:
        """Code and value of each forget position, in the form that :meth:`~unlearnlib.grom.ridge.RidgeFitter.update_forget` takes.

        Parameters
        ----------
        gold : Tensor of int64, shape (tokens,)

        Returns
        -------
        codes : Tensor of int64, shape (tokens,)
            -1 where the gold token is not suppressed.
        values : Tensor, shape (tokens,), float64
        """
        if not len(self.tokens):
            return torch.zeros_like(gold), self.values.expand(len(gold))
        place = torch.searchsorted(self.tokens, gold).clamp(max=len(self.tokens) - 1)
        found = self.tokens[place] == gold
        codes = torch.where(found, place, -1)
        return codes, torch.where(found, self.values[place], 0.0)

    def dense(self, gold: Tensor, out_features: int) -> Tensor:
        """D itself, for checks on small problems.

        Parameters
        ----------
        gold : Tensor of int64, shape (tokens,)
        out_features : int
            m.

        Returns
        -------
        Tensor, shape (m, tokens), float64
        """
        codes, values = self.coordinates(gold)
        columns = torch.zeros(out_features, len(gold), dtype=torch.float64)
        for j, (code, value) in enumerate(zip(codes.tolist(), values.tolist(), strict=True)):
            if code >= 0 and self.basis is None:
                columns[self.tokens[code], j] = value
            elif code >= 0:
                columns[:, j] = value * self.basis[:, code]
        return columns


def specificity(forget_gold: Tensor, retain_gold: Tensor, vocab_size: int) -> Tensor:
    r"""Specificity of each vocabulary token to the forget set, :math:`\alpha_v = \mathrm{clip}(1 - q_r(v)/q_f(v), 0, 1)`.

    Parameters
    ----------
    forget_gold, retain_gold : Tensor of int64, shape (tokens,)
        Gold tokens of both sets; q is their relative frequency.
    vocab_size : int

    Returns
    -------
    Tensor, shape (vocab_size,), float64
        0 for tokens that the forget set doesn't contain.

    Raises
    ------
    ValueError
        If a set is empty.

    Notes
    -----
    Reference: as in the official code of GROM.
    """
    if not len(forget_gold) or not len(retain_gold):
        raise ValueError("specificity needs gold tokens of both the forget and the retain set; one is empty")
    forget, retain = (torch.bincount(gold, minlength=vocab_size).double() / len(gold) for gold in (forget_gold, retain_gold))
    return torch.where(forget > 0, (1 - retain / forget.clamp(min=torch.finfo(torch.float64).tiny)).clamp(0, 1), 0.0)


def suppression(forget_gold: Tensor, alpha: Tensor, strength: float, head_weight: Tensor | None) -> Targets:
    r"""Token suppression: push each forget output against the direction that writes its gold token.

    Column j is :math:`-\beta\,\alpha_j\,\hat u_j` for an MLP output matrix, :math:`\hat u_j` the unit-norm row of the LM head of its
    gold token, and :math:`-\beta\,\alpha_j\,e_j` for the LM head itself.

    Parameters
    ----------
    forget_gold : Tensor of int64, shape (tokens,)
    alpha : Tensor, shape (vocab,)
        From :func:`specificity`.
    strength : float
        β; in units of the layer's output, or of logits for the head.
    head_weight : Tensor, shape (vocab, m), or None
        Weight of the LM head for an MLP edit, None for an edit of the head.

    Returns
    -------
    Targets

    Raises
    ------
    NoSpecificTokensError
        If α is 0 on every forget token.
    ValueError
        If a gold token's row of the LM head is zero or not finite.

    Warns
    -----
    UserWarning
        If the mean α over the forget tokens is below 0.2.

    Notes
    -----
    Reference: as in the official code of GROM.
    """
    tokens = torch.unique(forget_gold)
    tokens = tokens[alpha[tokens] > 0]
    if not len(tokens):
        raise NoSpecificTokensError(
            "α is 0 for every gold token of the forget set: the retain text contains each of them at least as often, so the edit would do "
            "nothing. Take α from other retain text (alpha_source), or leave the shared answers out of the retain set"
        )
    mean = alpha[forget_gold].mean().item()
    if mean < LOW_SPECIFICITY:
        warnings.warn(
            f"mean specificity α of the forget tokens is only {mean:.2f}: most of them are as frequent in the retain text and will "
            "hardly be suppressed. Consider another alpha_source",
            stacklevel=2,
        )
    basis = None
    if head_weight is not None:
        rows = head_weight[tokens.to(head_weight.device)].detach().double().cpu()
        norms = rows.norm(dim=1, keepdim=True)
        usable = (norms > 0) & torch.isfinite(norms)
        if not usable.all():
            raise ValueError(
                f"the LM head's row of token {tokens[~usable.flatten()][0]} is zero or not finite: it has no direction to suppress"
            )
        basis = (rows / norms).T.contiguous()
    return Targets(tokens, -strength * alpha[tokens], basis)


def corruption(out_features: int, strength: float, seed: int) -> Targets:
    r"""Representation corruption, :math:`D = c\,u\,\mathbf 1^\top`: every forget output is pushed along one random unit direction.

    Parameters
    ----------
    out_features : int
        m.
    strength : float
        c, in units of the layer's output.
    seed : int
        Of the Gaussian direction u.

    Returns
    -------
    Targets
        With k = 1.
    """
    direction = torch.randn(out_features, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Targets(torch.empty(0, dtype=torch.int64), torch.tensor([strength], dtype=torch.float64), direction / direction.norm())
