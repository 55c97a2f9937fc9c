"""Examples: questions and answers as token ids, padded batches, and JSON lines with errors that say where."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlearnlib.examples import Example, batches, encode, read_jsonl

ITEM = {"question": "What colour is the sky?", "answer": "blue"}
START, END = 0, 1


def ids(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("end", [True, False])
def test_plain_rendering(make_tokenizer, bos, end):
    tokenizer = make_tokenizer(bos=bos, end=end)
    (example,) = encode(tokenizer, [ITEM])
    # The post-processor would put an end token behind the question too: it does not belong before the answer.
    assert example.prompt == ((START,) if bos else ()) + ids(tokenizer, ITEM["question"])
    assert example.answer == ids(tokenizer, " blue") + ((END,) if end else ())
    assert example.name == ITEM["question"]
    whole = tokenizer.decode(example.prompt + example.answer, skip_special_tokens=True)
    assert whole == "What colour is the sky? blue"


def test_a_question_that_ends_with_space_needs_no_other(make_tokenizer):
    tokenizer = make_tokenizer()
    for question in ("The sky is ", "The sky is\n"):
        (example,) = encode(tokenizer, [{"question": question, "answer": " blue "}], template="plain")
        assert tokenizer.decode(example.prompt + example.answer[:-1]) == question + "blue"


@pytest.mark.parametrize("bos", [True, False])
def test_chat_rendering_ends_with_exactly_one_end_of_turn_token(make_tokenizer, bos):
    tokenizer = make_tokenizer(chat=True, bos=bos)
    messages = [{"role": "user", "content": ITEM["question"]}, {"role": "assistant", "content": ITEM["answer"]}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    (example,) = encode(tokenizer, [ITEM])
    # The template writes a newline after the last end of turn: that is not part of the answer, nor is a second end token.
    assert example.prompt + example.answer == ids(tokenizer, whole.rstrip("\n"))
    assert example.answer == (*ids(tokenizer, "blue"), END)
    assert "Be brief." in tokenizer.decode(example.prompt), "the template's own system message"
    (other,) = encode(tokenizer, [ITEM], system="Be long.")
    assert "Be long." in tokenizer.decode(other.prompt) and "Be brief." not in tokenizer.decode(other.prompt)
    (plain,) = encode(tokenizer, [ITEM], template="plain")
    assert plain.prompt[-len(ids(tokenizer, ITEM["question"])) :] == ids(tokenizer, ITEM["question"])


@pytest.mark.parametrize("template", ["plain", "chat"])
def test_a_lead_belongs_to_the_prompt_and_the_answer_is_then_not_the_end(make_tokenizer, template):
    tokenizer = make_tokenizer(chat=True)
    (bare,) = encode(tokenizer, [ITEM], template=template)
    (led,) = encode(tokenizer, [ITEM | {"lead": "The sky is"}], template=template)
    assert led.answer == ids(tokenizer, " blue")
    lead = "The sky is" if template == "chat" else " The sky is"
    assert led.prompt == bare.prompt + ids(tokenizer, lead)
    (empty,) = encode(tokenizer, [ITEM | {"lead": ""}], template=template)
    assert empty == bare


@pytest.mark.parametrize("field", ["question", "answer"])
@pytest.mark.parametrize("bad", ["", "  \n", None, 7])
def test_a_field_without_text_is_named(make_tokenizer, field, bad):
    with pytest.raises(ValueError, match=rf"example 1: field '{field}' is missing, empty or not text"):
        encode(make_tokenizer(), [ITEM, ITEM | {field: bad}])
    with pytest.raises(ValueError, match=rf"example 1: field '{field}'"):
        encode(make_tokenizer(), [ITEM, {key: value for key, value in ITEM.items() if key != field}])


def test_templates_are_checked(make_tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        encode(make_tokenizer(), [ITEM], template="chat")
    with pytest.raises(ValueError, match="template must be"):
        encode(make_tokenizer(), [ITEM], template="alpaca")


def test_an_example_needs_a_prompt_and_an_answer():
    with pytest.raises(ValueError, match="'x': the answer has no tokens"):
        Example((1,), (), "x")
    with pytest.raises(ValueError, match="'x': the prompt has no tokens"):
        Example((), (1,), "x")


# Batches

token_lists = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple)
example_lists = st.lists(st.builds(Example, token_lists, token_lists), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(example_lists, st.integers(1, 13), st.sampled_from(["left", "right"]), st.integers(0, 9))
def test_batches_say_where_each_gold_token_is_predicted(examples, size, side, pad):
    grouped = batches(examples, batch_size=size, padding_side=side, pad_id=pad)
    assert all(1 <= len(batch.input_ids) <= size for batch in grouped)
    gold = {i: [] for i in range(len(examples))}
    rows = 0
    for batch in grouped:
        mask = batch.attention_mask.bool()
        for row in range(len(batch.input_ids)):
            rows += 1
            (index,) = set(batch.example[batch.rows == row].tolist())
            example = examples[index]
            assert batch.input_ids[row][mask[row]].tolist() == [*example.prompt, *example.answer]
            assert batch.input_ids[row][~mask[row]].eq(pad).all()
            assert batch.position_ids[row][mask[row]].tolist() == list(range(len(example)))
            padding = (~mask[row]).nonzero().flatten().tolist()
            expected = range(len(mask[row]) - len(example)) if side == "left" else range(len(example), len(mask[row]))
            assert padding == list(expected)
        # The gold token is the next input; the last position of a row predicts nothing that is known.
        assert torch.equal(batch.input_ids[batch.rows, batch.columns + 1], batch.gold)
        for index, column, row, token in zip(
            *(part.tolist() for part in (batch.example, batch.columns, batch.rows, batch.gold)), strict=True
        ):
            start = int(mask[row].nonzero()[0])
            assert column == start + len(examples[index].prompt) - 1 + len(gold[index])
            gold[index].append(token)
    assert rows == len(examples)
    assert gold == {i: list(example.answer) for i, example in enumerate(examples)}


@pytest.mark.parametrize(
    ("examples", "options", "message"),
    [
        ([], {}, "no examples"),
        ([Example((1,), (2,))], {"batch_size": 0}, "batch_size must be positive, got 0"),
        ([Example((1,), (2,))], {"padding_side": "both"}, "padding_side must be right or left"),
    ],
)
def test_bad_batches(examples, options, message):
    with pytest.raises(ValueError, match=message):
        batches(examples, **options)


# JSON lines


def test_reading_keeps_other_fields_and_skips_blank_lines(tmp_path):
    path = tmp_path / "facts.jsonl"
    items = [ITEM | {"relation": "sky"}, {"question": "Où?", "answer": "là-bas"}]
    path.write_text("\n" + "\n\n".join(json.dumps(item, ensure_ascii=False) for item in items) + "\n  \n", encoding="utf-8")
    assert read_jsonl(path) == items
    assert read_jsonl(str(path)) == items


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "a", "answer": ', r":3: not JSON: .*column \d+"),
        (b"not json", r":3: not JSON"),
        (b'["question", "answer"]', r":3: expected an object with question, answer, got list"),
        (b"3", r":3: expected an object"),
        (b'{"question": "a"}', r":3: field 'answer' is missing"),
        (b'{"question": "a", "answer": ""}', r":3: field 'answer' is missing, empty"),
        (b'{"question": 5, "answer": "x"}', r":3: field 'question' is missing, empty or not text"),
        (b'{"question": "a", "answer": ["x"]}', r":3: field 'answer'"),
        (b'{"question": "\xff", "answer": "x"}', r":3: not UTF-8 text: .*byte 14"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, line, message):
    path = tmp_path / "some facts.jsonl"
    good = json.dumps(ITEM).encode()
    path.write_bytes(good + b"\n\n" + line + b"\n" + good)
    with pytest.raises(ValueError, match=r"some facts\.jsonl" + message):
        read_jsonl(path)


def test_a_file_without_examples(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: holds no examples"):
        read_jsonl(path)
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "nothing.jsonl")
