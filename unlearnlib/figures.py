"""How the book's figures look: one size and font, colours that colour-blind readers tell apart, bytes that do not change."""

from __future__ import annotations

from cycler import cycler

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
"""The palette of Okabe and Ito (2008), which is blue, vermilion, green, purple, orange, sky, yellow, black."""

WIDTH = 6.4
"""Width of a figure in inches, the text column of a page."""

_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=OKABE_ITO),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "figure.dpi": 100,
    "figure.figsize": (WIDTH, 3.6),
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 5,
    "savefig.facecolor": "white",
    # Glyphs as paths and a fixed salt: the same picture is the same file, and no reader needs the font.
    "svg.fonttype": "path",
    "svg.hashsalt": "unlearnlib",
}


def use_style() -> None:
    """Set matplotlib to the book's style; in a notebook, also to SVG output without a date.

    Call it in the first code cell. Figures of one page then differ between two runs only where their data do.
    """
    import matplotlib

    matplotlib.rcParams.update(_STYLE)
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is not None and hasattr(shell, "kernel"):
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", bbox_inches="tight", metadata={"Date": None})
