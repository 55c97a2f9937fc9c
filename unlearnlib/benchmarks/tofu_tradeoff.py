"""What each setting of a GROM edit does to forgetting and to preservation, on the stand-in request that settings are chosen on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..examples import Example, encode
from ..grom import FitData, FitSettings, attribution, select_band
from ..grom.choose import weigh
from ..remembered import remembered
from .tofu_study import Study

CODE = "import unlearnlib.benchmarks.tofu_tradeoff"

KNOBS = ("strength", "retain_weight", "ridge", "width", "retain_share")
"""β, :math:`w_r` and ρ; layers of the band; and the part of the rows to keep that the edit is shown."""


EXPANSION = 3.0
"""Factor by which a strength is raised or lowered until the wanted forgetting lies between two."""


@dataclass
class TradeOff:
    """A GROM edit of a band, its settings varied one at a time around a given one.

    Forgetting and preservation are those of :class:`~unlearnlib.grom.choose.Trial`: the part of the stand-in request's answer probability
    that is gone, and the part of the held-back authors' that is left. No row of the request or of the evaluation is used. What was
    tried is kept in the cache.

    Attributes
    ----------
    study : Study
    settings : FitSettings
        In the middle: a band of layers, of suppression.
    share : float
        Part of the rows to keep that the edit is shown, where it isn't varied, in (0, 1].
    draws : int
        Random choices of the rows to keep where their share is varied.
    """

    study: Study
    settings: FitSettings
    share: float = 1.0
    draws: int = 2
    _latest: tuple[tuple[float, int], FitData] | None = field(default=None, init=False, repr=False)

    def vary(self, knob: str, values: Sequence[float]) -> list[dict]:
        """Try some values of one setting, all others as they are.

        Parameters
        ----------
        knob : str
            One of :data:`KNOBS`.
        values : sequence of float
            Of `width`, numbers of layers, as the attribution selects them; of `retain_share`, parts of the rows to keep, in (0, 1]. The
            smaller part of a draw is contained in the larger one, and the specificity α is that of all rows, so that only the keys change.

        Returns
        -------
        list of dict
            One an edit: ``knob``, ``value``, ``draw``, ``retain_rows``, ``strength``, ``forgetting`` and ``preservation``.

        Raises
        ------
        ValueError
            If the setting is unknown or a value of it impossible; before anything is fitted.
        """
        return [named | self._try(*one) for named, one in self._bar(knob, values)]

    def matched(self, knob: str, values: Sequence[float], *, forgetting: float = 0.9, tries: int = 7) -> list[dict]:
        """What is preserved at an equal forgetting: for every value of a setting the strength is found at which so much is forgotten.

        A setting that makes an edit stronger or weaker would otherwise look bad or good for that alone. The strength is searched for by
        bisection of its logarithm; between the last two, strength and preservation are interpolated.

        Parameters
        ----------
        knob, values
            As in :meth:`vary`; not the strength.
        forgetting : float
            In (0, 1).
        tries : int
            Edits to fit for each, 2 at least.

        Returns
        -------
        list of dict
            One a value and draw, as in :meth:`vary`; ``preservation`` is None where no strength that was tried forgets less, or none more.

        Raises
        ------
        ValueError
            As in :meth:`vary`, and if a parameter is out of range.
        """
        if knob == "strength":
            raise ValueError("the strength is what is matched: it can't be varied as well")
        if not 0 < forgetting < 1 or tries < 2:
            raise ValueError(f"forgetting must be between 0 and 1, and tries at least 2, got {forgetting} and {tries}")
        return [named | self._match(*one, forgetting, tries) for named, one in self._bar(knob, values)]

    def _bar(self, knob: str, values: Sequence[float]) -> Iterable[tuple[dict, tuple[FitSettings, float, int]]]:
        if knob not in KNOBS:
            raise ValueError(f"unknown setting {knob!r}: use {', '.join(KNOBS)}")
        for share in (self.share, *(values if knob == "retain_share" else ())):
            if not 0 < share <= 1:
                raise ValueError(f"a share of the rows to keep must be above 0 and at most 1, got {share}")
        found = []
        for value in values:
            share = value if knob == "retain_share" else self.share
            fit = self.settings
            if knob == "width":
                fit = replace(fit, layers=self.band(int(value)))
            elif knob != "retain_share":
                fit = replace(fit, **{knob: value})
            # All of the rows are one choice of them.
            draws = self.draws if knob == "retain_share" and share < 1 else 1
            found += [({"knob": knob, "value": value, "draw": draw}, (fit, share, draw)) for draw in range(draws)]
        return tqdm(found, desc=f"varying {knob}", disable=not self.study.progress, leave=False)

    def _match(self, fit: FitSettings, share: float, draw: int, level: float, tries: int) -> dict:
        less = more = None
        for _ in range(tries):
            point = self._try(fit, share, draw)
            if point["forgetting"] < level:
                less = point
            else:
                more = point
            strength = fit.strength * EXPANSION if more is None else fit.strength / EXPANSION
            if less and more:
                strength = math.sqrt(less["strength"] * more["strength"])
            fit = replace(fit, strength=strength)
        if not (less and more):
            return point | {"preservation": None}
        part = (level - less["forgetting"]) / (more["forgetting"] - less["forgetting"])
        preservation = less["preservation"] + part * (more["preservation"] - less["preservation"])
        strength = less["strength"] * (more["strength"] / less["strength"]) ** part
        return less | {"strength": strength, "forgetting": level, "preservation": preservation}

    def band(self, width: int) -> tuple[int, ...]:
        """The band of so many layers that the attribution selects, among the last half of the layers or, if it is wider, as late as it can.

        Raises
        ------
        ValueError
            If the model hasn't so many layers.
        """
        depth = len(self._attribution)
        if not 1 <= width <= depth:
            raise ValueError(f"a band of this model has 1 to {depth} layers, got {width}")
        first = min(math.ceil(depth / 2), depth - width)
        # Just below a whole layer: rounding must not push it to the next one.
        return select_band(self._attribution, width, late=max(0.0, (first - 0.5) / depth))

    @cached_property
    def _attribution(self) -> Tensor:
        def compute() -> list[float]:
            data = self._data(self.share, 0)
            return attribution(data.model, *data.batches(self.settings), data.alpha).tolist()

        return torch.tensor(remembered("tofu-attribution", [*self._recipe(), self.settings.batch_size, self.share], compute, CODE))

    def _try(self, fit: FitSettings, share: float, draw: int) -> dict:
        rows = self._shown(share, draw)

        def compute() -> list[float]:
            data, before = self._data(share, draw), self._before
            with data.fit(fit).applied(data.model) as edited:
                trial = weigh(fit, before, self._measure(edited))
            return [trial.forgetting, trial.preservation]

        recipe = [*self._recipe(), asdict(fit), rows]
        forgetting, preservation = remembered("tofu-tradeoff", recipe, compute, CODE)
        return {"retain_rows": len(rows), "strength": fit.strength, "forgetting": forgetting, "preservation": preservation}

    def _recipe(self) -> list:
        study = self.study
        return [study.data.digest, study.folder("full"), asdict(study.tuning), study.rehearsal_authors, str(study.dtype)]

    def _shown(self, share: float, draw: int) -> list[int]:
        """Which of the stand-in's rows to keep the edit is shown."""
        count = len(self.study.rehearsal.retain)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.study.tuning.seed + draw)).tolist()
        return sorted(order[: max(1, round(share * count))])

    def _data(self, share: float, draw: int) -> FitData:
        """The data of a fit. Those used last are kept, with the states that enter a band."""
        if self._latest is None or self._latest[0] != (share, draw):
            retain = self._examples["retain"]
            shown = [retain[i] for i in self._shown(share, draw)]
            self._latest = (share, draw), FitData(self.study.full[0], self._examples["forget"], shown, alpha_source=retain)
        return self._latest[1]

    @cached_property
    def _examples(self) -> dict[str, list[Example]]:
        tuning, tokenizer = self.study.tuning, self.study.full[1]
        sets = vars(self.study.rehearsal)
        return {name: encode(tokenizer, rows, template=tuning.template, system=tuning.system) for name, rows in sets.items()}

    @cached_property
    def _before(self) -> list[Tensor]:
        return self._measure(self.study.full[0])

    def _measure(self, model: nn.Module) -> list[Tensor]:
        groups = (self._examples[name] for name in ("forget", "validation"))
        return [self.study.probability(model, group) for group in groups]


def averaged(rows: Sequence[Mapping], measure: str = "preservation") -> list[dict]:
    """A measure of each value of a setting: its mean over draws, and how far these lie apart.

    Parameters
    ----------
    rows : sequence of mapping
        From :meth:`TradeOff.vary` or :meth:`TradeOff.matched`; where the measure is None they are left out.
    measure : str

    Returns
    -------
    list of dict
        One a setting and value, in the order of `rows`: ``knob``, ``value``, the measure, and its ``low`` and ``high``.
    """
    found: dict[tuple, list[float]] = {}
    for row in rows:
        if row[measure] is not None:
            found.setdefault((row["knob"], row["value"]), []).append(row[measure])
    return [
        {"knob": knob, "value": value, measure: sum(seen) / len(seen), "low": min(seen), "high": max(seen)}
        for (knob, value), seen in found.items()
    ]
