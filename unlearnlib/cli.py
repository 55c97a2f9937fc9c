"""The command ``unlearnlib``: fit an edit for a request, apply it, audit it, export it, and ask a model what it says.

Here arguments are parsed and checked, and results printed; all the work is done by the library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from . import __version__, elicit, grom, models
from .examples import read_jsonl
from .grom.anatomy import is_tied
from .grom.edit import new_folder
from .metrics import contains_answer

EXPECTED = (ValueError, IndexError, OSError, models.ModelError, grom.IllConditionedError)
"""What is the fault of an input and not of the program: reported in one line, without a traceback."""

KEY_FILE = "fingerprints.key"
_KEY_TEXT = """\
# Key of the fingerprints in edit/edit.json. They tell nobody what was forgotten; with this key one can check whether an example was part
# of the request, in Python by grom.Edit.load("edit").covers(example, bytes.fromhex(key)), the key being the last line of this file.
# Whoever has both can try guesses as well, so keep this file apart from the edit, and as private as the request.
{key}
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv : list of str, optional
        Arguments; those of the process by default.

    Returns
    -------
    int
        The exit status: 0, 2 for an unusable input, 130 for an interruption. Arguments that cannot be parsed end the process with 2.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except KeyboardInterrupt:
        print(f"unlearnlib {args.command}: interrupted, nothing was written", file=sys.stderr)
        return 130
    except EXPECTED as error:
        print(f"unlearnlib {args.command}: error: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


# ---------------------------------------------------------------------------------------------------------------------------
# Commands


def _fetch(args: argparse.Namespace) -> None:
    print(models.fetch_embedded(progress=not args.quiet))


def _unlearn(args: argparse.Namespace) -> None:
    with new_folder(args.out) as scratch:
        forget, retain = read_jsonl(args.forget), read_jsonl(args.retain)
        alpha_source = None if args.alpha_source is None else read_jsonl(args.alpha_source)
        model, tokenizer = _load_model(args)
        edit, report = grom.unlearn(
            model,
            tokenizer,
            forget,
            retain,
            layers=args.layers,
            strength=args.strength,
            target=args.target,
            retain_weight=args.retain_weight,
            ridge=args.ridge,
            width=args.width,
            alpha_source=alpha_source,
            own_words=args.own_words,
            template=args.template,
            system=args.system,
            batch_size=args.batch_size,
            keep_audit=args.audit,
            seed=args.seed,
            progress=not args.quiet,
        )
        described = {"unlearnlib": __version__, "model": args.model, "dtype": args.dtype} | report.to_dict()
        with _private_files():
            edit.save(scratch / "edit", audit=args.audit)
            (scratch / "report.json").write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            (scratch / "report.txt").write_text(f"{report}\n", encoding="utf-8")
            (scratch / KEY_FILE).write_text(_KEY_TEXT.format(key=edit.key.hex()), encoding="utf-8")
    args.out.chmod(0o700)
    print(report)
    print(f"written to {args.out}: edit ({'with' if args.audit else 'without'} audit data), report.json, report.txt, {KEY_FILE}")
    print(f"{KEY_FILE} tells whether an example was part of the request: keep it apart from the edit, see its first lines")


def _apply(args: argparse.Namespace) -> None:
    with new_folder(args.out) as scratch:
        edit, model, tokenizer = _load_edit_and_model(args)
        kept = edit.survival(model)
        was_tied = is_tied(model)
        edit.apply(model)
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    for module, share in kept.items():
        print(f"{module}: {share:.1%} of the edit survives the rounding to {_type_name(model)}")
    if was_tied and not is_tied(model):
        print("the LM head was untied from the input embedding, and the saved config says so")
    print(f"written to {args.out}: the edited model and its tokenizer")


def _audit(args: argparse.Namespace) -> None:
    edit = _read_edit(args.edit)
    audit = edit.audit()
    influences = audit.norms().square().sum(0).sqrt()
    order = influences.argsort(descending=True).tolist()[: args.top]
    found = {
        "edit_norm": edit.norm(),
        "matrices": [matrix.module for matrix in edit.matrices],
        "examples": [{"index": i, "name": audit.names[i], "influence": influences[i].item()} for i in order],
    }
    if args.group is not None:
        parts = audit.influence(args.group)
        joint = sum(part.norm() ** 2 for part in parts) ** 0.5
        found["group"] = {"indices": args.group, "influence": joint, "leverage": max(part.leverage for part in parts)}
    print(json.dumps(found, indent=1, ensure_ascii=False) if args.json else _ranking_table(found))


def _ranking_table(found: dict) -> str:
    lines = [f"‖P‖ = {found['edit_norm']:.6g} over {', '.join(found['matrices'])}", " index   ‖P − P₋e‖     of ‖P‖   example"]
    for entry in found["examples"]:
        name = textwrap.shorten(entry["name"], 80, placeholder=" …")
        lines.append(f"{entry['index']:>6}  {entry['influence']:>10.4g}  {entry['influence'] / found['edit_norm']:>9.1%}   {name}")
    if "group" in found:
        group = found["group"]
        indices = ", ".join(map(str, group["indices"]))
        lines.append(f"together, {indices}: {group['influence']:.4g}, {group['influence'] / found['edit_norm']:.1%} of ‖P‖")
    lines.append("exact for each matrix while s, μ, α and all other keys are held fixed; the norms of single examples don't add up")
    return "\n".join(lines)


def _export_lora(args: argparse.Namespace) -> None:
    if args.untied_base == args.out:
        raise ValueError(f"--out and --untied-base are both {args.out}: the adapter and its base need a folder each")
    with ExitStack() as stack:
        scratch = stack.enter_context(new_folder(args.out))
        edit, model, tokenizer = _load_edit_and_model(args)
        untied_base = None
        if is_tied(model) and any(_is_head(model, matrix.module) for matrix in edit.matrices):
            if args.untied_base is None:
                raise ValueError(
                    f"the edit changes the LM head, which {args.model!r} shares with its input embedding, and a merged adapter would "
                    "change both: name a folder for an untied copy of the base with --untied-base"
                )
            untied_base = stack.enter_context(new_folder(args.untied_base))
            grom.untie(model)
            model.save_pretrained(untied_base)
            tokenizer.save_pretrained(untied_base)
            model.config.name_or_path = str(args.untied_base)
        edit.export_lora(scratch, model)
    print(f"written to {args.out}: a PEFT LoRA adapter of rank {max(matrix.rank for matrix in edit.matrices)}")
    if untied_base is not None:
        print(f"written to {args.untied_base}: the base with an untied LM head, which the adapter is for")
    elif args.untied_base is not None:
        print(f"{args.untied_base} was not written: the adapter goes onto the base as it is")


def _is_head(model: nn.Module, module: str) -> bool:
    return model.get_submodule(module) is model.get_output_embeddings()


def _ask(args: argparse.Namespace) -> None:
    items = [{"question": text} for text in args.question] if args.questions is None else read_jsonl(args.questions, ["question"])
    if args.edit is None:
        edit, (model, tokenizer) = None, _load_model(args)
    else:
        edit, model, tokenizer = _load_edit_and_model(args)
    options = {"max_new_tokens": args.max_new_tokens, "template": args.template, "system": args.system}
    with nullcontext() if edit is None else edit.applied(model):
        said = elicit.ask(model, tokenizer, items, **options)
    given = []
    for item, text in zip(items, said, strict=True):
        verdict = ""
        if answer := _known_answer(item):
            given.append(contains_answer(text, answer))
            verdict = f"   [{'gives' if given[-1] else 'does not give'} {answer!r}]"
        print(f"{item['question']}\n  {text}{verdict}")
    if given:
        print(f"{sum(given)} of {len(given)} known answers are given")


def _known_answer(item: dict) -> str | None:
    answer = item.get("answer")
    return answer if isinstance(answer, str) and answer.strip() else None


# ---------------------------------------------------------------------------------------------------------------------------
# What commands share


def _load_model(args: argparse.Namespace):
    return models.load(args.model, dtype="auto" if args.dtype == "auto" else getattr(torch, args.dtype), device=args.device)


def _load_edit_and_model(args: argparse.Namespace):
    edit = _read_edit(args.edit)
    model, tokenizer = _load_model(args)
    edit.check(model)
    return edit, model, tokenizer


def _read_edit(folder: Path) -> grom.Edit:
    """The edit in a folder, or in the folder ``edit`` of one that ``unlearnlib unlearn`` wrote."""
    return grom.Edit.load(folder / "edit" if (folder / "edit").is_dir() else folder)


def _type_name(model: nn.Module) -> str:
    return str(model.dtype).removeprefix("torch.")


@contextmanager
def _private_files() -> Iterator[None]:
    """Files made in here can be read by their owner only: a report quotes the request, an edit tells of its tokens."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


# ---------------------------------------------------------------------------------------------------------------------------
# Arguments


class _Parser(argparse.ArgumentParser):
    """Errors in one line, as all errors of this command are."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (--help explains)\n")


def _checked(kind: type, holds: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
        return value

    return parse


_POSITIVE = _checked(float, lambda number: 0 < number < float("inf"), "a finite number above 0")
_NOT_NEGATIVE = _checked(float, lambda number: 0 <= number < float("inf"), "a finite number, 0 or more")
_COUNT = _checked(int, lambda number: number > 0, "a whole number above 0")
_WHOLE = _checked(int, lambda number: number >= 0, "a whole number, 0 or more")


def _layers(text: str) -> str | tuple[int | str, ...]:
    if text in ("auto", "mlp", "head"):
        return text
    found: list[int | str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        layers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ["head"] if part == "head" else []
        if not layers:
            raise argparse.ArgumentTypeError(f"expected auto, mlp, head, or layers like 24-29 or 24-29,head, got {text!r}")
        found += layers
    return tuple(found)


def _indices(text: str) -> list[int]:
    return [_WHOLE(part) for part in text.split(",")]


def _device(text: str) -> str:
    try:
        # Every solve is in float64, which not every accelerator has.
        torch.empty(0, device=text, dtype=torch.float64)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not to be had here: {str(error).splitlines()[0]}") from None
    return text


def _parser() -> _Parser:
    description = "Make a language model forget, in closed form, and audit what was done."
    parser = _Parser(prog="unlearnlib", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], summary: str, details: str, example: str) -> _Parser:
        added = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added.set_defaults(run=run)
        return added

    fetch = command(
        "fetch",
        _fetch,
        "get the embedded model into the cache and print its folder",
        f"It is known as {models.EMBEDDED};\nthe environment variable UNLEARNLIB_CACHE moves the cache.",
        "unlearnlib fetch",
    )
    _add_quiet(fetch)

    unlearn = command(
        "unlearn",
        _unlearn,
        "fit an edit for a request",
        "What isn't given is chosen on validation data from the\n"
        "retain set, and the report says why. The model itself is not changed: see unlearnlib apply.",
        "unlearnlib unlearn --model my-model --forget request.jsonl --retain retain.jsonl --out request-17",
    )
    _add_model(unlearn, "float32")
    unlearn.add_argument("--forget", type=Path, required=True, metavar="FILE", help="the request: JSON lines with question and answer")
    unlearn.add_argument("--retain", type=Path, required=True, metavar="FILE", help="what is to be kept, in the same form")
    unlearn.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the edit, the reports and the key")
    unlearn.add_argument("--layers", type=_layers, default="auto", help="auto, mlp, head, or layers as in 24-29,head (default auto)")
    unlearn.add_argument("--strength", type=_POSITIVE, metavar="β", help="strength of the edit, c of a corruption (default: chosen)")
    unlearn.add_argument("--target", choices=("suppress", "corrupt"), default="suppress", help="kind of target (default suppress)")
    unlearn.add_argument("--retain-weight", type=_NOT_NEGATIVE, default=100.0, metavar="W", help="weight of the retain keys (default 100)")
    unlearn.add_argument("--ridge", type=_NOT_NEGATIVE, default=0.03, metavar="ρ", help="ridge over the mean diagonal of A (default 0.03)")
    unlearn.add_argument("--width", type=_COUNT, default=6, metavar="N", help="layers of a chosen band (default 6)")
    unlearn.add_argument("--alpha-source", type=Path, metavar="FILE", help="text that counts as common, for α (default: the retain set)")
    _add_template(unlearn)
    unlearn.add_argument("--batch-size", type=_COUNT, default=16, metavar="N", help="examples a forward pass (default 16)")
    unlearn.add_argument("--seed", type=_WHOLE, default=0, help="of the validation split and a corruption's direction (default 0)")
    unlearn.add_argument("--no-own-words", dest="own_words", action="store_false", help="don't look up where the model says the answers")
    unlearn.add_argument("--no-audit", dest="audit", action="store_false", help="don't keep what an audit needs")
    _add_quiet(unlearn)

    apply = command(
        "apply",
        _apply,
        "save a model with an edit in its weights",
        "Says how much of the edit survives the rounding to the weights' type.",
        "unlearnlib apply request-17 --model my-model --out my-model-edited",
    )
    _add_edit(apply)
    _add_model(apply, "auto")
    apply.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the edited model")

    audit = command(
        "audit",
        _audit,
        "rank the examples of a request by their influence on the edit",
        "Exact, without refitting.",
        "unlearnlib audit request-17 --top 5 --group 0,3",
    )
    _add_edit(audit)
    audit.add_argument("--top", type=_COUNT, metavar="N", help="show the N most influential (default: all)")
    audit.add_argument("--group", type=_indices, metavar="I,J,…", help="also the joint influence of these examples, by index")
    audit.add_argument("--json", action="store_true", help="print JSON")

    export = command(
        "export-lora",
        _export_lora,
        "write an edit as a PEFT LoRA adapter",
        "Merged into the base it gives the edited model. An edit of a\nLM head that is tied to the input embedding needs an untied base.",
        "unlearnlib export-lora request-17 --model my-model --out request-17-lora",
    )
    _add_edit(export)
    _add_model(export, "auto")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the adapter")
    export.add_argument(
        "--untied-base", type=Path, metavar="DIR", help="new folder for an untied copy of the base, written where a tied LM head is edited"
    )

    ask = command(
        "ask",
        _ask,
        "ask a model questions, with or without an edit",
        "Answers are greedy and end with their first line; where the\nfile gives an answer too, says whether it is given.",
        "unlearnlib ask --model my-model --edit request-17 --questions paraphrases.jsonl",
    )
    _add_model(ask, "float32")
    ask.add_argument("--edit", type=Path, metavar="DIR", help="edit to apply before asking")
    questions = ask.add_mutually_exclusive_group(required=True)
    questions.add_argument("--questions", type=Path, metavar="FILE", help="JSON lines with question, and answer where it is known")
    questions.add_argument("--question", action="append", metavar="TEXT", help="a question; may be given several times")
    _add_template(ask)
    ask.add_argument("--max-new-tokens", type=_COUNT, default=32, metavar="N", help="length of an answer at most (default 32)")
    return parser


def _add_edit(parser: _Parser) -> None:
    parser.add_argument("edit", type=Path, metavar="EDIT", help="folder that unlearnlib unlearn wrote, or the edit folder in it")


def _add_model(parser: _Parser, dtype: str) -> None:
    parser.add_argument("--model", required=True, help=f"{models.EMBEDDED}, the folder of a saved model, or a Hub id owner/name")
    types = ("auto", "float32", "bfloat16", "float16", "float64")
    parser.add_argument("--dtype", choices=types, default=dtype, help=f"of the weights; auto is the checkpoint's own (default {dtype})")
    parser.add_argument("--device", type=_device, default="cpu", help="where to compute (default cpu)")


def _add_template(parser: _Parser) -> None:
    choices = ("auto", "chat", "plain")
    parser.add_argument("--template", choices=choices, default="auto", help="how to render questions (default auto: chat if there is one)")
    parser.add_argument("--system", metavar="TEXT", help="system message (default: what the chat template does without one)")


def _add_quiet(parser: _Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


if __name__ == "__main__":
    sys.exit(main())
