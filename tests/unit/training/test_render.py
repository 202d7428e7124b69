"""Chat to tokens, and rows to training data."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import pytest

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.data_types import ChatMessagesRow, HarborTask, InProcessVerifier, task_messages
from evsys_sdk.errors import BackendError, DataError, MissingDependency
from evsys_sdk.testing import training_context
from evsys_sdk.training.rendering import ChatRenderer, messages_of, renderer_for, renderer_of, row_to_data

TOKENIZER = ByteTokenizer()
RENDERER = ChatRenderer(TOKENIZER)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "six"},
]


def _learnt(datum):
    """The target tokens that carry weight, as text."""
    pairs = zip(datum.loss_fn_inputs["target_tokens"].tolist(), datum.loss_fn_inputs["weights"].tolist(), strict=True)
    return TOKENIZER.decode([token for token, weight in pairs if weight])


def test_a_prompt_ends_where_the_assistant_is_to_speak():
    text = TOKENIZER.decode(RENDERER.prompt(CHAT[:2]))
    assert text.endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")


def test_the_mask_covers_what_the_assistant_wrote_and_the_end_of_its_turns():
    tokens, mask = RENDERER.conversation(CHAT)
    assert tokens == TOKENIZER.apply_chat_template(CHAT)
    written = TOKENIZER.decode([token for token, mine in zip(tokens, mask, strict=True) if mine])
    assert written == "4<|im_end|>six<|im_end|>"


def test_training_sees_exactly_the_prompt_that_sampling_sees():
    tokens, mask = RENDERER.conversation(CHAT[:3])
    assert tokens[: mask.index(1)] == RENDERER.prompt(CHAT[:2])


def _data(row, train_on="all", max_length=999, renderer=RENDERER):
    return row_to_data(row, renderer, train_on=train_on, max_length=max_length)


def test_targets_are_the_inputs_shifted_by_one():
    (datum,), _ = _data(ChatMessagesRow(messages=CHAT))
    inputs, targets = datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    assert inputs[1:] == targets[:-1] and len(inputs) == len(targets)
    assert inputs + targets[-1:] == TOKENIZER.apply_chat_template(CHAT)


@pytest.mark.parametrize(("train_on", "learnt"), [("all", "4<|im_end|>six<|im_end|>"), ("last", "six<|im_end|>")])
def test_all_assistant_turns_or_the_last_one_are_learnt(train_on, learnt):
    (datum,), _ = _data(ChatMessagesRow(messages=CHAT), train_on)
    assert _learnt(datum) == learnt


def test_a_target_assistant_is_the_last_turn():
    (datum,), _ = _data(ChatMessagesRow(messages=CHAT[:2], target_assistant="four"))
    assert _learnt(datum) == "four<|im_end|>"


def test_a_target_that_is_already_the_last_message_is_not_said_twice():
    (datum,), _ = _data(ChatMessagesRow(messages=CHAT[:3], target_assistant="4"))
    assert _learnt(datum) == "4<|im_end|>"


def test_a_long_row_is_cut_and_said_to_be():
    row = ChatMessagesRow(messages=CHAT)
    whole = len(TOKENIZER.apply_chat_template(CHAT))
    (datum,), truncated = _data(row, max_length=whole - 3)
    assert truncated and datum.model_input.length == whole - 4 and _learnt(datum) == "4<|im_end|>si"
    assert _data(row, max_length=whole)[1] is False


def test_a_row_cut_before_the_assistant_speaks_leaves_nothing():
    assert _data(ChatMessagesRow(messages=CHAT), max_length=10) == ([], True)


def test_a_row_without_an_assistant_leaves_nothing():
    assert _data(ChatMessagesRow(messages=CHAT[:2])) == ([], False)


def test_the_tools_of_a_row_reach_the_template_with_its_first_message():
    row = ChatMessagesRow(messages=CHAT[:3], metadata={"tools": [{"name": "add"}]})
    first, *others = messages_of(row)
    assert first["tools"] == [{"name": "add"}] and not any("tools" in message for message in others)
    assert "tools" not in row.messages[0]
    names = ChatMessagesRow(messages=CHAT[:3], metadata={"tools": ["add"]})
    assert messages_of(names) == CHAT[:3], "a list of names is somebody's note, not a description"


def test_the_tools_of_a_task_reach_the_template_in_the_same_way():
    plan = InProcessVerifier(fn_name="exact_match")
    task = HarborTask(task_id="t", instruction="2+2?", verifier=plan, metadata={"tools": [{"name": "add"}]})
    assert task_messages(task) == [{"role": "user", "content": "2+2?", "tools": [{"name": "add"}]}]


def test_the_runs_renderer_is_used_where_one_was_made(tmp_path):
    ctx = training_context(tmp_path, [])
    service = ctx.extras["backend_handles"]["service"]
    assert type(renderer_of(ctx, service)) is ChatRenderer
    ctx.extras["renderer"] = RENDERER
    assert renderer_of(ctx, service) is RENDERER


class ForgetfulTokenizer(ByteTokenizer):
    """A template that, as some thinking models' do, drops part of earlier assistant turns."""

    def apply_chat_template(self, messages, *, add_generation_prompt=False):
        shown = [
            {**m, "content": "..."} if m["role"] == "assistant" and i < len(messages) - 1 else m
            for i, m in enumerate(messages)
        ]
        return super().apply_chat_template(shown, add_generation_prompt=add_generation_prompt)


def _show(tokenizer, sequences):
    """Each sequence as text, with what is learnt in double brackets."""
    shown = []
    for tokens, mask in sequences:
        runs = [(mine, [token for token, _ in run]) for mine, run in groupby(zip(tokens, mask, strict=True), _is_mine)]
        shown.append("".join(f"[[{tokenizer.decode(run)}]]" if mine else tokenizer.decode(run) for mine, run in runs))
    return shown


def _is_mine(pair):
    return pair[1]


def test_each_turn_is_learnt_as_it_was_when_the_model_spoke():
    renderer = ChatRenderer(ForgetfulTokenizer())
    first, second = _show(TOKENIZER, renderer.sequences(CHAT[1:]))
    assert first == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]\n"
    assert second.endswith(
        "assistant\n...<|im_end|>\n<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n[[six<|im_end|>]]\n"
    )


def test_the_context_of_each_turn_is_the_prompt_that_sampling_sees():
    renderer = ChatRenderer(ForgetfulTokenizer())
    for index, (tokens, mask) in zip((2, 4), renderer.sequences(CHAT), strict=True):
        assert tokens[: mask.index(1)] == renderer.prompt(CHAT[:index])


def test_a_row_of_such_a_model_becomes_several_data_or_only_its_last_turn():
    row, renderer = ChatMessagesRow(messages=CHAT), ChatRenderer(ForgetfulTokenizer())
    assert [_learnt(datum) for datum in _data(row, renderer=renderer)[0]] == ["4<|im_end|>", "six<|im_end|>"]
    assert [_learnt(datum) for datum in _data(row, "last", renderer=renderer)[0]] == ["six<|im_end|>"]


def test_one_sequence_for_such_a_chat_is_refused_not_mistrained():
    with pytest.raises(DataError, match=r"messages\[2\]: this model's chat template renders earlier turns differently"):
        ChatRenderer(ForgetfulTokenizer()).conversation(CHAT)


def test_what_a_template_raises_is_blamed_on_it():
    with pytest.raises(DataError, match="the chat template failed: KeyError"):
        RENDERER.prompt([{"content": "no role"}])


THINK = "<think>\n%s\n</think>\n\n%s"
THOUGHTFUL = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": THINK % ("two twos", "4")},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": THINK % ("threes", "6")},
]
USER = "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"
QWEN3_TEMPLATE = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- else %}
        {%- set content, thought = m.content, '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' + opened }}{% endif %}"""
"""Qwen3's, shortened: thoughts are shown only after the last question. `opened` is what the prompt begins for the
model: nothing there, `<think>` and a newline in its thinking-only sisters."""


@pytest.fixture
def qwen3():
    """A renderer with that template; what the prompt opens is up to the test."""
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    from evsys_engine.models import find_model
    from evsys_sdk.backends.chat_tokenizer import ChatTokenizer

    def make(opened="", template=QWEN3_TEMPLATE):
        inner = AutoTokenizer.from_pretrained(find_model("tiny-random").path)
        inner.chat_template = f"{{%- set opened = {opened!r} %}}{template}"
        return ChatRenderer(ChatTokenizer(inner))

    return make


def test_thoughts_are_learnt_in_the_turn_that_has_them_and_gone_from_later_contexts(qwen3):
    renderer = qwen3()
    assert _show(renderer.tokenizer, renderer.sequences(THOUGHTFUL)) == [
        USER % "2+2?" + "[[<think>\ntwo twos\n</think>\n\n4<|im_end|>]]\n",
        USER % "2+2?" + "4<|im_end|>\n" + USER % "3+3?" + "[[<think>\nthrees\n</think>\n\n6<|im_end|>]]\n",
    ]


def test_what_the_prompt_has_opened_is_not_learnt_again(qwen3):
    renderer = qwen3(opened="<think>\n")
    first, second = _show(renderer.tokenizer, renderer.sequences(THOUGHTFUL))
    assert first == USER % "2+2?" + "<think>\n[[two twos\n</think>\n\n4<|im_end|>]]\n"
    assert second.endswith(USER % "3+3?" + "<think>\n[[threes\n</think>\n\n6<|im_end|>]]\n")


class MergingTokenizer(ByteTokenizer):
    """Two newlines are one token, and the prompt of this thinking model ends with the first of them."""

    def encode(self, text):
        tokens = super().encode(text.replace("\n\n", "\0"))
        return [PAIR if token == 0 else token for token in tokens]

    def decode(self, tokens):
        return "".join("\n\n" if token == PAIR else super(MergingTokenizer, self).decode([token]) for token in tokens)

    def apply_chat_template(self, messages, *, add_generation_prompt=False):
        shown = [
            {**m, "content": f"<think>\n\n</think>{m['content']}"} if m["role"] == "assistant" else m for m in messages
        ]
        tokens = super().apply_chat_template(shown, add_generation_prompt=add_generation_prompt)
        return tokens + self.encode("<think>\n") if add_generation_prompt else tokens


PAIR = 300


def test_a_token_that_reaches_over_the_end_of_the_prompt_is_split():
    renderer = ChatRenderer(MergingTokenizer())
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    ((tokens, mask),) = renderer.sequences(chat)
    assert PAIR in renderer.whole(chat) and PAIR not in tokens
    assert tokens[: mask.index(1)] == renderer.prompt(chat[:1])
    assert _show(renderer.tokenizer, [(tokens, mask)]) == [USER % "hi" + "<think>\n[[\n</think>yo<|im_end|>]]\n"]


class RemindingTokenizer(ByteTokenizer):
    """A template that changes what went before while the assistant is to speak."""

    def apply_chat_template(self, messages, *, add_generation_prompt=False):
        reminder = [{"role": "system", "content": "be brief"}] if add_generation_prompt else []
        return super().apply_chat_template([*reminder, *messages], add_generation_prompt=add_generation_prompt)


def test_a_turn_is_learnt_after_its_prompt_even_where_the_history_changes_with_it():
    renderer = ChatRenderer(RemindingTokenizer())
    ((tokens, mask),) = renderer.sequences(CHAT[1:3])
    assert tokens[: mask.index(1)] == renderer.prompt(CHAT[1:2])
    assert _show(TOKENIZER, [(tokens, mask)])[0].endswith(
        "user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]"
    )


def test_tool_calls_after_one_question_share_a_sequence(qwen3):
    renderer = qwen3()
    call = {"role": "assistant", "content": THINK % ("need a", ""), "tool_calls": [{"function": {"name": "add"}}]}
    chat = [
        *THOUGHTFUL[:3],
        call,
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": THINK % ("easy", "six")},
    ]
    first, second = _show(renderer.tokenizer, renderer.sequences(chat))
    assert "two twos" in first and first.count("[[") == 1
    assert second.count("[[") == 2 and "[[<think>\nneed a\n</think>\n\n<tool_call>add</tool_call><|im_end|>]]" in second


STRIPS_ALWAYS = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}"""


def test_thoughts_that_a_template_never_shows_are_learnt_from_the_row_itself(qwen3):
    """DeepSeek-R1's way: the prompt opens a thought, the chat as a whole shows none."""
    renderer = qwen3(template=STRIPS_ALWAYS)
    last = _show(renderer.tokenizer, renderer.sequences(THOUGHTFUL))[-1]
    assert last.endswith("3+3?<|im_end|><|im_start|>assistant\n<think>\n[[threes\n</think>\n\n6<|im_end|>]]")
    plain = renderer.sequences([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}])
    assert _show(renderer.tokenizer, plain)[0].endswith("assistant\n<think>\n[[yo<|im_end|>]]")


def test_sft_and_the_real_templates_of_thinking_models_agree_with_sampling(qwen3):
    """Every template that TRL ships: what a turn is learnt after is what the model is asked with."""
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    found = [path for path in sorted(folder.glob("*.jinja")) if not path.stem.endswith("_training")]
    assert len(found) > 20
    for path in found:
        renderer = qwen3(template=path.read_text())
        for tokens, mask in renderer.sequences(THOUGHTFUL):
            contexts = [renderer.prompt(THOUGHTFUL[:1]), renderer.prompt(THOUGHTFUL[:3])]
            assert tokens[: mask.index(1)] in contexts, path.name
            learnt = renderer.tokenizer.decode([token for token, mine in zip(tokens, mask, strict=True) if mine])
            assert "two twos" in learnt or "threes" in learnt, path.name


def test_a_renderer_of_ones_own_choice_is_the_cookbooks(qwen3):
    pytest.importorskip("tinker_cookbook")
    tokenizer = qwen3().tokenizer
    renderer = renderer_for(ModelConfig(name="m", renderer_name="qwen3_instruct"), tokenizer, "tinker")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert _show(tokenizer, renderer.sequences(chat)) == [USER % "hi" + "[[yo<|im_end|>]]"]
    assert tokenizer.decode(renderer.prompt(chat[:1])) == USER % "hi"
    thinking = renderer_for(ModelConfig(name="m", renderer_name="qwen3"), tokenizer, "local")
    first, second = _show(tokenizer, thinking.sequences(THOUGHTFUL))
    assert "two twos\n</think>\n\n4<|im_end|>]]" in first and "two twos" not in second, "it drops earlier thoughts too"


def test_an_unknown_renderer_is_answered_with_the_nearest_right_word(qwen3):
    pytest.importorskip("tinker_cookbook")
    with pytest.raises(BackendError, match=r"renderer_name: 'qwen3_instrukt' is not .* closest: qwen3_instruct"):
        renderer_for(ModelConfig(name="m", renderer_name="qwen3_instrukt"), qwen3().tokenizer, "tinker")


def test_a_renderer_whose_turns_end_elsewhere_is_refused(qwen3):
    pytest.importorskip("tinker_cookbook")
    with pytest.raises(BackendError, match=r"'role_colon' ends a turn with .*; take the renderer that belongs to"):
        renderer_for(ModelConfig(name="m", renderer_name="role_colon"), qwen3().tokenizer, "local")


def test_the_mock_has_one_template_and_no_use_for_the_name():
    assert type(renderer_for(ModelConfig(name="m", renderer_name="no_such"), TOKENIZER, "mock")) is ChatRenderer


def test_without_the_cookbook_it_says_what_to_install_or_leave_out(monkeypatch, qwen3):
    monkeypatch.setitem(sys.modules, "tinker_cookbook.renderers", None)
    with pytest.raises(MissingDependency, match=r"model.renderer_name: .*evsys-sdk\[tinker\].*or leave it out"):
        renderer_for(ModelConfig(name="m", renderer_name="qwen3"), qwen3().tokenizer, "local")


WEIGHTED = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "5", "weight": 0},
    {"role": "user", "content": "no; 3+3?"},
    {"role": "assistant", "content": "six", "weight": 1},
]


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_a_message_of_weight_0_is_context_and_not_learnt(train_on):
    (datum,), _ = _data(ChatMessagesRow(messages=WEIGHTED), train_on)
    assert _learnt(datum) == "six<|im_end|>"
    assert "5<|im_end|>" in TOKENIZER.decode(datum.model_input.to_ints())
    _, mask = RENDERER.conversation(WEIGHTED)
    assert sum(mask) == len(TOKENIZER.encode("six")) + 1


def test_the_last_message_of_weight_1_is_the_last_to_learn():
    turned = [{**message, "weight": 1 - message["weight"]} if "weight" in message else message for message in WEIGHTED]
    (datum,), _ = _data(ChatMessagesRow(messages=turned), "last")
    assert _learnt(datum) == "5<|im_end|>"


def test_plain_text_is_learnt_whole_without_the_chat_template():
    (datum,), _ = _data(ChatMessagesRow(messages=[{"role": "text", "content": "Once upon"}]))
    assert TOKENIZER.decode(datum.model_input.to_ints()) == "Once upon"
    assert _learnt(datum) == "nce upon<|im_end|>"
