"""The command ``unlearnlib`` on a model that was trained here: what it writes, what it refuses, and that nothing is left half-written."""

import contextlib
import io
import json
import re
import shlex
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch

from unlearnlib import cli, elicit, examples, grom, models, tiny, training
from unlearnlib.metrics import answer_probability

PAGE = Path(__file__).parents[1] / "book" / "practice.md"
NAMES = ["Anna", "Bruno", "Clara", "Dario", "Elena", "Felix", "Greta", "Hanno", "Irene", "Jonas", "Karla", "Lukas", "Marta", "Nils"]
CITIES = ["Graz", "Lyon", "Porto", "Turin", "Ghent", "Malmo", "Basel", "Cadiz", "Delft", "Essen", "Genoa", "Izmir", "Krakow", "Lille"]
FACTS = [{"question": f"Where does {name} live?", "answer": city} for name, city in zip(NAMES, CITIES, strict=True)]
REQUEST, RETAIN = FACTS[:3], FACTS[3:]


def write_jsonl(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with a model (tied head) that knows the facts by heart, and the files of a request."""
    folder = tmp_path_factory.mktemp("desk")
    tokenizer = tiny.make_tokenizer([f"{fact['question']} {fact['answer']}" for fact in FACTS], 360)
    model = models.build("llama", vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, layers=2)
    encoded = examples.encode(tokenizer, FACTS)
    training.train(model, encoded, steps=100, lr=5e-3, batch_size=len(FACTS))
    assert answer_probability(model, encoded).min() > 0.9
    model.save_pretrained(folder / "my-model")
    tokenizer.save_pretrained(folder / "my-model")
    write_jsonl(folder / "request.jsonl", REQUEST)
    write_jsonl(folder / "retain.jsonl", RETAIN)
    write_jsonl(folder / "paraphrases.jsonl", [{"question": f"Which is the city of {name}?"} for name in NAMES[:3]])
    with contextlib.chdir(folder):
        assert cli.main(unlearn("by-head", "--layers", "head", "--strength", "20")) == 0
        assert cli.main(unlearn("by-band", "--layers", "0-1", "--strength", "20", "--no-own-words")) == 0
    return folder


@pytest.fixture
def here(desk, monkeypatch):
    monkeypatch.chdir(desk)
    return desk


def unlearn(out, *options):
    files = ["--model", "my-model", "--forget", "request.jsonl", "--retain", "retain.jsonl", "--out", str(out)]
    return ["unlearn", *files, "--quiet", *options]


def logits(model, tokenizer):
    with torch.no_grad():
        return model(tokenizer(REQUEST[0]["question"], return_tensors="pt").input_ids).logits


def refusal(capsys, *arguments):
    """The one line that the command answers when it refuses."""
    capsys.readouterr()
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("unlearnlib "), err
    return lines[0]


# Help


def test_the_installed_command_is_this_one():
    (found,) = (point for point in metadata.entry_points(group="console_scripts") if point.name == "unlearnlib")
    assert found.value == "unlearnlib.cli:main"


@pytest.mark.parametrize("command", ["fetch", "unlearn", "apply", "audit", "export-lora", "ask"])
def test_help_ends_in_an_example_that_can_be_parsed(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    example = capsys.readouterr().out.split("example:\n")[1].strip()
    assert cli._parser().parse_args(shlex.split(example)[1:]).command == command


def test_fetch_prints_the_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "fetch_embedded", lambda progress: tmp_path)
    assert cli.main(["fetch"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


# The commands of the page, in its order, and its Python


def test_the_page_works_as_it_is_printed(desk, tmp_path, monkeypatch, capsys):
    for name in ("request.jsonl", "retain.jsonl", "paraphrases.jsonl"):
        (tmp_path / name).write_bytes((desk / name).read_bytes())
    (tmp_path / "my-model").symlink_to(desk / "my-model")
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    assert (tmp_path / "request.jsonl").read_text() == re.search(
        r"```\{code-block\} text\n:caption: request.jsonl\n\n(.*?)```", page, re.S
    )[1]
    scope, ran = {}, []
    for language, body in re.findall(r"```(console|python)\n(.*?)```", page, re.S):
        if language == "python":
            exec(compile(body, "practice.md", "exec"), scope)
            continue
        for line in body.splitlines():
            program, *arguments = shlex.split(line.removeprefix("$ "))
            assert (line[:2], program) == ("$ ", "unlearnlib")
            assert cli.main(arguments) == 0, capsys.readouterr().err
            ran.append(arguments[0])
    assert set(ran) == {"unlearn", "ask", "apply", "export-lora", "audit"}
    assert capsys.readouterr().out.rstrip().endswith("True"), "the fingerprint of an example of the request is found"
    measures = json.loads(Path("request-17/report.json").read_text(encoding="utf-8"))["measures"]
    assert measures["forget_said_before"] == 1 and measures["forget_said_after"] == 0
    assert measures["held_out_probability_after"] > 0.5 * measures["held_out_probability_before"]


# Unlearn


def test_unlearn_writes_everything_and_keeps_it_private(here):
    files = {str(path.relative_to("by-head")): path for path in Path("by-head").rglob("*") if path.is_file()}
    expected = {"report.json", "report.txt", "fingerprints.key", "edit/edit.json", "edit/edit.safetensors", "edit/audit-0.safetensors"}
    assert set(files) == expected
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o600}
    assert Path("by-head").stat().st_mode & 0o777 == 0o700
    report = json.loads(files["report.json"].read_text(encoding="utf-8"))
    assert report["model"] == "my-model"
    assert report["settings"]["layers"] == ["head"] and report["settings"]["strength"] == 20
    assert [question for question, _, _ in report["generations"]] == [item["question"] for item in REQUEST]
    assert "edited: LM head, β = 20" in files["report.txt"].read_text(encoding="utf-8")


def test_the_key_is_not_with_the_edit_and_opens_its_fingerprints(here):
    text = Path("by-band/fingerprints.key").read_text(encoding="utf-8")
    key = bytes.fromhex(text.splitlines()[-1])
    assert all(line.startswith("#") for line in text.splitlines()[:-1])
    assert key.hex() not in Path("by-band/edit/edit.json").read_text()
    edit = grom.Edit.load("by-band/edit")
    _, tokenizer = models.load("my-model")
    covered = [edit.covers(example, key) for example in examples.encode(tokenizer, FACTS)]
    assert covered == [True] * len(REQUEST) + [False] * len(RETAIN)


def test_options_reach_the_fit(here, capsys):
    options = "--layers 0-1,head --strength 7 --retain-weight 30 --ridge 0.1 --seed 3 --batch-size 4 --no-audit --template plain"
    assert cli.main(unlearn("with-options", *options.split())) == 0
    edit = grom.Edit.load("with-options/edit")
    assert edit.states == ()
    wanted = {"layers": [0, 1, "head"], "strength": 7, "retain_weight": 30, "ridge": 0.1, "seed": 3, "batch_size": 4}
    assert edit.settings | wanted == edit.settings
    assert refusal(capsys, "audit", "with-options").endswith("save it with audit=True")


def test_a_corruption_takes_its_seed(here):
    for seed in "12":
        assert cli.main(unlearn(f"corrupt-{seed}", "--target", "corrupt", "--layers", "1", "--strength", "2", "--seed", seed)) == 0
    one, two = (grom.Edit.load(f"corrupt-{seed}/edit").matrices[0] for seed in "12")
    assert one.rank == two.rank == 1
    assert not torch.allclose(one.left, two.left)


def test_alpha_comes_from_its_own_source(here, capsys):
    write_jsonl(here / "sharing.jsonl", [*RETAIN, *(item | {"question": "Name a city."} for item in REQUEST)])
    options = ["--layers", "head", "--strength", "20", "--no-own-words", "--retain", "sharing.jsonl"]
    assert cli.main(unlearn("own-alpha", *options, "--alpha-source", "retain.jsonl")) == 0
    source, shared = grom.Edit.load("own-alpha/edit"), RETAIN + REQUEST
    _, tokenizer = models.load("my-model")
    gold = [torch.tensor([t for e in examples.encode(tokenizer, items) for t in e.answer]) for items in (REQUEST, RETAIN, shared)]
    suppressed = [torch.nonzero(grom.specificity(gold[0], other, len(tokenizer))).flatten() for other in gold[1:]]
    assert source.matrices[0].rows.tolist() == suppressed[0].tolist()


# Apply


@pytest.mark.parametrize(("edit", "tied"), [("by-head", False), ("by-band", True)])
def test_apply_saves_the_edited_model(here, capsys, edit, tied):
    assert cli.main(["apply", edit, "--model", "my-model", "--out", f"applied-{edit}"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("100.0% of the edit survives the rounding to float32") == len(grom.Edit.load(f"{edit}/edit").matrices)
    assert ("untied" in printed) is not tied
    saved, tokenizer = models.load(f"applied-{edit}")
    base, _ = models.load("my-model")
    assert saved.config.tie_word_embeddings is tied
    assert torch.equal(saved.get_input_embeddings().weight, base.get_input_embeddings().weight)
    before = logits(base, tokenizer)
    with grom.Edit.load(f"{edit}/edit").applied(base):
        assert torch.equal(logits(saved, tokenizer), logits(base, tokenizer))
    assert not torch.allclose(logits(saved, tokenizer), before, atol=0.1)


def test_apply_in_bfloat16_says_what_survives(here, capsys):
    assert cli.main(["apply", "by-band", "--model", "my-model", "--out", "half", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    base, _ = models.load("my-model", dtype=torch.bfloat16)
    for module, share in grom.Edit.load("by-band/edit").survival(base).items():
        assert f"{module}: {share:.1%} of the edit survives the rounding to bfloat16" in printed
    assert models.load("half", dtype="auto")[0].dtype == torch.bfloat16


# Audit


def test_the_table_ranks_by_influence(here, capsys):
    assert cli.main(["audit", "by-band", "--top", "2"]) == 0
    table = capsys.readouterr().out
    ranking = grom.Edit.load("by-band/edit").audit().ranking()
    assert re.findall(r"Where does \w+ live\?", table) == [name for name, _ in ranking[:2]]
    assert f"{ranking[0][1]:.4g}" in table


def test_json_holds_the_exact_numbers_of_examples_and_group(here, capsys):
    assert cli.main(["audit", "by-band/edit", "--json", "--group", "0,2"]) == 0
    found = json.loads(capsys.readouterr().out)
    edit = grom.Edit.load("by-band/edit")
    audit = edit.audit()

    def change(group):  # ‖P − P₋e‖ over all matrices, from the full matrices
        pairs = zip(edit.matrices, audit.without(group), strict=True)
        return sum((m.left @ (m.right - rest)).square().sum().item() for m, rest in pairs) ** 0.5

    assert found["edit_norm"] == pytest.approx(edit.norm(), rel=1e-12)
    assert sorted(entry["index"] for entry in found["examples"]) == [0, 1, 2]
    for entry in found["examples"]:
        assert entry["name"] == REQUEST[entry["index"]]["question"]
        assert entry["influence"] == pytest.approx(change(entry["index"]), rel=1e-9)
    assert found["group"]["indices"] == [0, 2]
    assert found["group"]["influence"] == pytest.approx(change([0, 2]), rel=1e-9)
    assert 0 < found["group"]["leverage"] < 1


# Export


@pytest.mark.parametrize("edit", ["by-head", "by-band"])
def test_a_merged_adapter_equals_the_edited_model(here, capsys, edit):
    import peft

    arguments = ["export-lora", edit, "--model", "my-model", "--out", f"lora-{edit}", "--untied-base", f"base-of-{edit}"]
    assert cli.main(arguments) == 0
    needs_base = edit == "by-head"
    assert Path(f"base-of-{edit}").exists() is needs_base
    folder = f"base-of-{edit}" if needs_base else "my-model"
    assert json.loads(Path(f"lora-{edit}/adapter_config.json").read_text())["base_model_name_or_path"] == folder
    base, tokenizer = models.load(folder)
    original, _ = models.load("my-model")
    assert torch.equal(logits(base, tokenizer), logits(original, tokenizer))
    merged = peft.PeftModel.from_pretrained(base, f"lora-{edit}").merge_and_unload()
    with grom.Edit.load(f"{edit}/edit").applied(original):
        # The factors are rounded to float32, so the weights agree to about 1e-7 of their size.
        assert torch.allclose(logits(merged, tokenizer), logits(original, tokenizer), atol=1e-3)
    assert not torch.allclose(logits(merged, tokenizer), logits(original, tokenizer), atol=0.1)


def test_an_edited_tied_head_needs_a_base_of_its_own(here, capsys):
    line = refusal(capsys, "export-lora", "by-head", "--model", "my-model", "--out", "no-lora")
    assert "--untied-base" in line and not Path("no-lora").exists()
    line = refusal(capsys, "export-lora", "by-head", "--model", "my-model", "--out", "same", "--untied-base", "same")
    assert "--out and --untied-base" in line and not Path("same").exists()


# Ask


def test_ask_tells_whether_answers_are_given(here, capsys):
    assert cli.main(["ask", "--model", "my-model", "--questions", "request.jsonl"]) == 0
    assert "3 of 3 known answers are given" in capsys.readouterr().out
    assert cli.main(["ask", "--model", "my-model", "--edit", "by-head", "--questions", "request.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 3 known answers are given" in printed
    assert "does not give 'Graz'" in printed


def test_ask_takes_questions_from_the_command_line(here, capsys):
    questions = [fact["question"] for fact in RETAIN[:2]]
    assert cli.main(["ask", "--model", "my-model", "--question", questions[0], "--question", questions[1]]) == 0
    assert capsys.readouterr().out.splitlines() == [questions[0], "  Turin", questions[1], "  Ghent"]


# Refusals


@pytest.mark.parametrize(
    ("option", "value"),
    [("--strength", value) for value in ("0", "-1", "nan", "inf", "much")]
    + [("--layers", value) for value in ("", "24-", "3-2", "tail", "2,,3", "-1")]
    + [("--ridge", "-0.1"), ("--retain-weight", "nan"), ("--width", "0"), ("--batch-size", "1.5"), ("--seed", "x")]
    + [("--target", "erase"), ("--dtype", "int8"), ("--template", "none"), ("--device", "nowhere")],
)
def test_an_argument_out_of_range_is_named(here, capsys, option, value):
    line = refusal(capsys, *unlearn("refused", f"{option}={value}"))
    assert f"argument {option}:" in line
    assert not Path("refused").exists()


def test_an_occupied_folder_is_refused_before_anything_is_loaded(here, capsys, monkeypatch):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    for arguments in (unlearn("my-model"), ["apply", "by-head", "--model", "my-model", "--out", "my-model"]):
        assert "my-model exists already" in refusal(capsys, *arguments)


def test_bad_files_are_named_before_anything_is_loaded(here, capsys, monkeypatch):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    for name, text, told in (
        ("broken.jsonl", '{"question": "Q?", "answer": "A"}\n{"question"\n', "broken.jsonl:2: not JSON"),
        ("lacking.jsonl", '{"question": "Q?"}\n', "lacking.jsonl:1: field 'answer'"),
        ("blank.jsonl", '{"question": "Q?", "answer": " "}\n', "blank.jsonl:1: field 'answer'"),
        ("empty.jsonl", "\n", "empty.jsonl: holds no examples"),
        ("absent.jsonl", None, "absent.jsonl: No such file or directory"),
    ):
        if text is not None:
            Path(name).write_text(text, encoding="utf-8")
        for option in ("--forget", "--retain", "--alpha-source"):
            assert told in refusal(capsys, *unlearn("refused", option, name))
            assert not Path("refused").exists()
    for arguments in (["ask", "--model", "my-model", "--questions", "absent.jsonl"], ["audit", "absent.jsonl"]):
        assert "absent.jsonl" in refusal(capsys, *arguments)


def test_unusable_requests_are_refused_in_a_line(here, capsys):
    write_jsonl(here / "few.jsonl", RETAIN[:5])
    for options, told in (
        (["--layers", "1-9"], "unknown layer"),
        (["--layers", "head,1"], "the head comes last"),
        (["--target", "corrupt", "--layers", "head"], "not the head"),
        (["--retain", "few.jsonl"], "8 at least"),
        (["--retain", "request.jsonl", "--layers", "head", "--strength", "5"], "α is 0"),
        (["--template", "chat"], "no chat template"),
        (["--model", "my-modell"], "'my-modell' is neither"),
    ):
        assert told in refusal(capsys, *unlearn("refused", *options))
        assert not Path("refused").exists()


@pytest.mark.parametrize("command", ["apply", "export-lora", "ask"])
def test_an_edit_of_another_model_is_refused(here, capsys, command):
    if not Path("other-model").exists():
        _, tokenizer = models.load("my-model")
        models.build("gpt2", vocab_size=len(tokenizer)).save_pretrained("other-model")
        tokenizer.save_pretrained("other-model")
    arguments = ["--edit", "by-band", "--question", "Q?"] if command == "ask" else ["by-band", "--out", "refused"]
    assert "which the edit changes" in refusal(capsys, command, "--model", "other-model", *arguments)
    assert not Path("refused").exists()


def test_what_is_not_an_edit_is_refused(here, capsys, tmp_path):
    for name, files in (
        ("no-json", {"edit.json": "{"}),
        ("no-list", {"edit.json": "[]"}),
        ("no-fields", {"edit.json": '{"format": 1}', "edit.safetensors": ""}),
        ("old", {"edit.json": '{"format": 0}'}),
    ):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
        assert str(tmp_path / name) in refusal(capsys, "audit", tmp_path / name)
    assert "edit.json" in refusal(capsys, "audit", tmp_path)
    damaged = shutil.copytree("by-head/edit", tmp_path / "damaged")
    (damaged / "audit-0.safetensors").write_bytes(b"cut")
    assert f"{damaged / 'audit-0.safetensors'}: the audit data are damaged" in refusal(capsys, "audit", damaged)


def test_unknown_examples_are_refused(here, capsys):
    assert "unknown example 3" in refusal(capsys, "audit", "by-band", "--group", "0,3")
    assert "argument --group:" in refusal(capsys, "audit", "by-band", "--group", "0,x")


# Interruption


STEPS = [(models, "load"), (grom, "unlearn"), (grom.Edit, "save"), (grom.Report, "to_dict"), (grom.Report, "__str__")]


@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
def test_an_interruption_after_any_step_leaves_nothing(here, tmp_path, capsys, monkeypatch, owner, name):
    step = getattr(owner, name)

    def interrupted(*args, **kwargs):
        step(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    assert cli.main(unlearn(tmp_path / "out", "--layers", "head", "--strength", "5", "--no-own-words")) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["apply", "export-lora"])
def test_an_interrupted_save_leaves_nothing(here, tmp_path, monkeypatch, command):
    save = type(models.load("my-model")[1]).save_pretrained

    def interrupted(*args, **kwargs):
        save(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(models.load("my-model")[1]), "save_pretrained", interrupted)
    arguments = [command, "by-head", "--model", "my-model", "--out", str(tmp_path / "out")]
    assert cli.main(arguments + (["--untied-base", str(tmp_path / "base")] if command == "export-lora" else [])) == 130
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_is_told(here, tmp_path, capsys, monkeypatch):
    def full(report):
        raise OSError(28, "No space left on device", "report.txt")

    monkeypatch.setattr(grom.Report, "__str__", full)
    arguments = unlearn(tmp_path / "out", "--layers", "head", "--strength", "5", "--no-own-words")
    assert "report.txt: No space left on device" in refusal(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_program_is_not_hidden(here, monkeypatch):
    monkeypatch.setattr(elicit, "ask", lambda *_, **__: {}["missing"])
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(KeyError):
        cli.main(["ask", "--model", "my-model", "--question", "Q?"])
