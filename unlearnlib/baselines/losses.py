"""Losses of the gradient methods, as functions of log-probabilities of whole answers.

Each answer y to a question x enters with ℓ(y|x) = Σ_t log π(y_t), the sum over its tokens, and its number of tokens, n; means are over
answers, not over tokens. ℓ_ref is the same number under the model before unlearning. All are minimised.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def nll(log_probs: Tensor, lengths: Tensor) -> Tensor:
    """Negative log-likelihood a token, −mean ℓ/n: the retain term of every method.

    Parameters
    ----------
    log_probs : Tensor, shape (answers,)
        ℓ of each answer, nats.
    lengths : Tensor, shape (answers,)
        n, tokens.

    Returns
    -------
    Tensor, scalar

    Raises
    ------
    ValueError
        If the shapes differ, are not one-dimensional, or there are no answers; so do all losses here.
    """
    _check(log_probs=log_probs, lengths=lengths)
    return -(log_probs / lengths).mean()


def grad_ascent(log_probs: Tensor, lengths: Tensor) -> Tensor:
    """Gradient ascent, mean ℓ/n; unbounded below. GradDiff adds the retain term.

    Parameters
    ----------
    log_probs, lengths : Tensor, shape (answers,)
        Of the answers to forget.

    Returns
    -------
    Tensor, scalar
    """
    return -nll(log_probs, lengths)


def npo(log_probs: Tensor, reference: Tensor, beta: float) -> Tensor:
    """Negative preference optimisation, −(2/β) mean log σ(−β (ℓ − ℓ_ref)).

    Parameters
    ----------
    log_probs, reference : Tensor, shape (answers,)
        ℓ and ℓ_ref of the answers to forget.
    beta : float
        Inverse temperature. As it falls to 0, the gradient becomes that of mean ℓ, ascent without division by n; as it grows, the loss
        becomes 2 mean max(0, ℓ − ℓ_ref), which is content with the slightest fall.

    Returns
    -------
    Tensor, scalar

    Notes
    -----
    Zhang et al. (2024).
    """
    _check(log_probs=log_probs, reference=reference)
    _check_beta(beta)
    return -2 / beta * logsigmoid(-beta * (log_probs - reference)).mean()


def simnpo(log_probs: Tensor, lengths: Tensor, beta: float, margin: float = 0.0) -> Tensor:
    """NPO by length-normalised probability and without a reference, −(2/β) mean log σ(−(β/n) ℓ − γ).

    Parameters
    ----------
    log_probs, lengths : Tensor, shape (answers,)
        Of the answers to forget.
    beta : float
        As it falls to 0 with γ = 0, the gradient becomes that of :func:`grad_ascent`.
    margin : float
        γ. The common implementation multiplies its own δ by β: γ = β δ.

    Returns
    -------
    Tensor, scalar

    Notes
    -----
    Fan et al. (2024).
    """
    _check(log_probs=log_probs, lengths=lengths)
    _check_beta(beta)
    return -2 / beta * logsigmoid(-beta * log_probs / lengths - margin).mean()


def dpo(win: Tensor, lose: Tensor, reference_win: Tensor, reference_lose: Tensor, beta: float) -> Tensor:
    """Direct preference optimisation, −(2/β) mean log σ(β [(ℓ − ℓ_ref)(y_win) − (ℓ − ℓ_ref)(y_lose)]).

    Parameters
    ----------
    win, reference_win : Tensor, shape (answers,)
        ℓ and ℓ_ref of the answers to prefer: refusals in IdkDPO, plausible alternatives in AltPO.
    lose, reference_lose : Tensor, shape (answers,)
        ℓ and ℓ_ref of the answers to forget, in the same order.
    beta : float

    Returns
    -------
    Tensor, scalar

    Notes
    -----
    Rafailov et al. (2023), with the factor 2/β in place of 1, so that β sets the shape and not the size of its gradient.
    """
    _check(win=win, lose=lose, reference_win=reference_win, reference_lose=reference_lose)
    _check_beta(beta)
    return -2 / beta * logsigmoid(beta * ((win - reference_win) - (lose - reference_lose))).mean()


def _check(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    first = next(iter(shapes.values()))
    # Shapes that merely broadcast would average over pairs of different answers.
    if len(first) != 1 or first[0] == 0 or set(shapes.values()) != {first}:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"expected one number for each of at least one answer, all of the same shape, got {listed}")


def _check_beta(beta: float) -> None:
    if not 0 < beta < float("inf"):
        raise ValueError(f"beta must be a finite number > 0, got {beta}")
