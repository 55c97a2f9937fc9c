# Runs of notebooks, their comparison with the committed records, and the book. Usually called through the Makefile.
#
#   snakemake --cores 2                                          the tiny profile, the book, the comparison
#   snakemake --cores 2 reproduce --config profile=smol only=…   runs of another profile, and their comparison
#   snakemake --cores 2 html                                     the book's pages alone
#   add missing=1 behind --config to leave out runs that have a committed record, -n to see what would run
#
# Whether something is out of date is decided by content, never by modification times, which a git checkout scrambles: the
# hashes below are parameters of the rules, and a changed parameter is what makes Snakemake run a rule again.

import hashlib
import json
import shlex
import sys
from pathlib import Path

from unlearnlib import profiles, runs

ROOT = Path(workflow.basedir)
PYTHON = shlex.quote(sys.executable)
BIN = shlex.quote(str(Path(sys.executable).parent))
PROFILE = config.get("profile", "tiny")
ONLY = str(config.get("only") or "")  # `only=` arrives as None
ALLOW_DIRTY = "--allow-dirty" if config.get("allow_dirty") else ""
MISSING = "--missing" if config.get("missing") else ""
BOOK_SOURCES = ("book", "results", "unlearnlib", "profiles", "notebooks", "_config.yml", "_toc.yml")

try:
    TINY = profiles.load("tiny", ROOT)
    CHOSEN = TINY if PROFILE == "tiny" else profiles.load(PROFILE, ROOT)
    SELECTED = CHOSEN.select(ONLY)
    if MISSING:
        SELECTED = runs.missing(SELECTED, ROOT)
    RUNS = {str(run): run for run in TINY.runs + CHOSEN.runs}
    SOURCES = {notebook: runs.sources(notebook, ROOT) for notebook in {run.notebook for run in RUNS.values()}}
except profiles.ProfileError as error:
    sys.exit(f"error: {error}")


def outputs(selected):
    """The records of some runs; a record is written last, after its notebook."""
    return [run.record(runs.RUNS) for run in selected]


def sources_of(run):
    """The hash that says whether a run is stale. That of one that gathers others is asked for again once those are there."""
    return runs.run_sources(run, ROOT, runs.RUNS) if run.gathers else SOURCES[run.notebook]


def gathered_by(run):
    """The fresh records that a run needs before it can gather: of runs that are asked for, too, or have no committed record of today's."""
    wanted = {str(other) for other in SELECTED}
    return outputs(
        other
        for other in run.gathers
        if other.profile == run.profile
        and (str(other) in wanted or runs.available(other, ROOT, runs.RUNS) != other.record(ROOT / "results"))
    )


def tree_hash(*names):
    """The hash of all files below some folders, by path and content."""
    paths = sorted(f for name in names for f in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*")))
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def out_of(record):
    """The option that names the folder of fresh runs: three above a record, wherever a storage plugin has put that."""
    return f" --out $(dirname $(dirname $(dirname {{{record}}})))"


def run_of(wildcards):
    return RUNS[f"{wildcards.profile}/{wildcards.notebook}/{wildcards.run}"]


wildcard_constraints:
    profile="[a-z]+",
    notebook="[a-z0-9_]+",
    run="[A-Za-z0-9._-]+",


localrules: all, reproduce, runs, html


# Once all runs are there: says how they compare with the committed records, and fails if an exact value disagrees.
rule all:
    default_target: True
    input:
        outputs(TINY.runs),
        "_build/html/index.html",
    shell:
        "{PYTHON} -m unlearnlib.runs compare"


rule reproduce:
    input:
        outputs(SELECTED),
    params:
        profile=PROFILE,
        only=ONLY,
    shell:
        "{PYTHON} -m unlearnlib.runs compare --profile {params.profile} --only={params.only:q} " + MISSING + (out_of("input[0]") if SELECTED else "")


rule runs:
    input:
        outputs(SELECTED),


rule run:
    input:
        lambda wildcards: gathered_by(run_of(wildcards)),
    output:
        notebook="_build/runs/{profile}/{notebook}/{run}.ipynb",
        record="_build/runs/{profile}/{notebook}/{run}.json",
    params:
        sources=lambda wildcards: sources_of(run_of(wildcards)),
        parameters=lambda wildcards: json.dumps(run_of(wildcards).parameters),
    threads: CHOSEN.threads
    resources:
        **CHOSEN.resources,
    shell:
        "OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads} {PYTHON} -m unlearnlib.runs run --profile {wildcards.profile} "
        "{wildcards.notebook}/{wildcards.run} " + ALLOW_DIRTY + out_of("output.record")


# The pages come from committed notebooks and records only: those of expensive profiles are inputs and never rebuilt here.
# Always a whole build: an incremental one would not repeat the warnings of a page that it doesn't read again.
rule html:
    output:
        "_build/html/index.html",
    params:
        content=tree_hash(*BOOK_SOURCES),
    shell:
        "echo 'building the pages …' >&2; rm -rf _build/html; "
        "{BIN}/jupyter-book build . --all -W -n --keep-going --quiet > _build/html.log && {PYTHON} book/_ext/check_pages.py _build/html"
