r"""The editors' closed forms: least squares for the change of an MLP output matrix W, on the keys of facts.

K has the keys of all facts as columns, R the wanted changes of the outputs, and C is the uncentred second moment of keys over general
text, a token. Where the change is R times something, only that is computed here: the *directions* in which it reads keys.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def rome_directions(keys: Tensor, moment_inverse: Tensor | None = None) -> Tensor:
    r"""Direction in which ROME writes one key, :math:`(C^{-1}k)^\top / (k^\top C^{-1} k)`: it reads 1 at k.

    Parameters
    ----------
    keys : Tensor, shape (1, n)
    moment_inverse : Tensor, shape (n, n), optional
        :math:`C^{-1}`; the identity by default.

    Returns
    -------
    Tensor, shape (1, n)
        The edit is the column of the wanted change times this row.

    Notes
    -----
    Meng et al. (2022), eq. 2.
    """
    rows = keys if moment_inverse is None else keys @ moment_inverse
    return rows / (rows * keys).sum(-1, keepdim=True)


def memit_directions(keys: Tensor, moment: Tensor | None = None, weight: float = 1.0) -> Tensor:
    r"""Directions in which MEMIT writes keys, :math:`K^\top (\lambda C + K K^\top)^{-1}`.

    Parameters
    ----------
    keys : Tensor, shape (facts, n)
        Kᵀ.
    moment : Tensor, shape (n, n), optional
        C. Without it the edit is the smallest that gives every key its output, the limit λ → 0.
    weight : float
        λ.

    Returns
    -------
    Tensor, shape (facts, n)
        The edit is R times these rows.

    Notes
    -----
    Meng et al. (2023).
    """
    if moment is None:
        return torch.linalg.pinv(keys).T
    return _solve(weight * moment + keys.T @ keys, keys.T, "λ C + K Kᵀ").T


def null_space(moment: Tensor, threshold: float) -> Tensor:
    """Orthonormal basis of the directions that general text hardly uses, shape (n, directions): those of C with small eigenvalues.

    Raises
    ------
    ValueError
        If there is none.
    """
    values, vectors = torch.linalg.eigh(moment)
    basis = vectors[:, values < threshold]
    if not basis.shape[1]:
        raise ValueError(
            f"no eigenvalue of the keys' second moment is below the threshold {threshold}: they go from {values[0]:.2e} to {values[-1]:.2e}"
        )
    return basis


def alpha_directions(keys: Tensor, basis: Tensor | None, l2: float, earlier: Tensor | None = None) -> Tensor:
    r"""Directions in which AlphaEdit writes keys, :math:`K^\top \Pi (K_p K_p^\top \Pi + K K^\top \Pi + L_2 I)^{-1}`.

    Parameters
    ----------
    keys : Tensor, shape (facts, n)
        Kᵀ.
    basis : Tensor, shape (n, directions) or None
        N with Π = N Nᵀ, see :func:`null_space`; Π = I where it is None.
    l2 : float
    earlier : Tensor, shape (earlier facts, n), optional
        Keys of earlier edits, :math:`K_p^\top`.

    Returns
    -------
    Tensor, shape (facts, n)
        In the span of the basis: orthogonal to all other directions up to rounding. The edit is R times these rows.

    Notes
    -----
    Fang et al. (2025). With Z the coordinates of all keys in the basis this is the facts' part of N Z (ZᵀZ + L₂ I)⁻¹, so that a
    system of the size of the number of facts is solved.
    """
    together = keys if earlier is None else torch.cat([keys, earlier])
    inside = together if basis is None else together @ basis
    system = inside @ inside.T
    system.diagonal().add_(l2)
    rows = _solve(system, inside, "Zᵀ Z + L₂ I")[: len(keys)]
    return rows if basis is None else rows @ basis.T


def zero_unlearn_factors(
    weight: Tensor,
    keys: Tensor,
    residual: Tensor,
    true: Tensor,
    moment: Tensor | None,
    *,
    general_weight: float,
    forget_weight: float,
    regularization: float,
) -> tuple[Tensor, Tensor]:
    r"""Factors of ZeroUnlearn's edit :math:`G W - W`.

    With a, b and λ the three weights, G minimises
    :math:`a\,\mathrm{tr}[(GW - W) C (GW - W)^\top] + b\,\|G W K - (W K + R)\|^2 + \lambda\,\|G W - W\|^2`
    under the constraint that no output is left along those that say the true answers, :math:`U^\top G = 0`.

    Parameters
    ----------
    weight : Tensor, shape (m, n)
        W.
    keys : Tensor, shape (facts, n)
        Kᵀ.
    residual : Tensor, shape (facts, m)
        Rᵀ, the wanted changes of the outputs.
    true : Tensor, shape (facts, m)
        Outputs that make the model say the true answers; U is an orthonormal basis of their span.
    moment : Tensor, shape (n, n), optional
        C; 0 by default.
    general_weight, forget_weight, regularization : float
        a, b and λ.

    Returns
    -------
    left : Tensor, shape (m, k)
    right : Tensor, shape (k, n)

    Warns
    -----
    UserWarning
        If the true answers' outputs span all directions: the edited matrix is then 0.

    Notes
    -----
    Lin et al. (2026): :math:`G = Q (\bar V \bar K^\top + \lambda W) W^\top [W (\bar K \bar K^\top + \lambda I) W^\top]^{-1}`,
    Q = I − U Uᵀ, the bars for general text and facts together. Form and weights are those of its official code, its equations were not at
    hand. Ours is the derivation: this is the minimiser above, and it has a low rank, since general text is to keep its own outputs, so that
    :math:`\bar V \bar K^\top = W \bar K \bar K^\top + b R K^\top` and, with :math:`S = \bar K \bar K^\top + \lambda I`,
    :math:`G = Q (I + b R K^\top W^\top [W S W^\top]^{-1})`. The projection applies to whatever the matrix writes, general text too.
    """
    total = forget_weight * keys.T @ keys
    if moment is not None:
        total += general_weight * moment
    total.diagonal().add_(regularization)
    rows = _solve(weight @ total @ weight.T, weight @ keys.T, "W (K Kᵀ + λ I) Wᵀ").T @ weight
    left, values, _ = torch.linalg.svd(true.T, full_matrices=False)
    away = left[:, values > values[0] * 1e-10]
    if away.shape[1] == len(weight):
        warnings.warn(
            f"the true answers of {len(keys)} facts take up all {len(weight)} output directions: ZeroUnlearn's projection leaves nothing "
            "of the matrix. It is meant for fewer facts than that",
            stacklevel=2,
        )
    change = forget_weight * residual.T
    return torch.cat([-away, change - away @ (away.T @ change)], 1), torch.cat([away.T @ weight, rows])


def with_ridge(moment: Tensor, ridge: float) -> Tensor:
    """C with an addition to its diagonal, in units of its mean diagonal."""
    moment = moment.clone()
    moment.diagonal().add_(ridge * moment.diagonal().mean())
    return moment


def _factor(matrix: Tensor, name: str) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(matrix)
    if info:
        raise ValueError(f"{name} is singular: raise the ridge or the regularization, or take the moments from more text")
    return factor


def _solve(matrix: Tensor, right: Tensor, name: str) -> Tensor:
    """Solve with a symmetric positive definite matrix."""
    return torch.cholesky_solve(right, _factor(matrix, name))


def inverse(moment: Tensor) -> Tensor:
    """Inverse of C.

    Raises
    ------
    ValueError
        If it is singular.
    """
    return torch.cholesky_inverse(_factor(moment, "C"))
