"""Another chat template than the model's own: text, a file, or a renderer's name."""

from __future__ import annotations

import pytest

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.errors import BackendError, DataError
from evsys_sdk.training.rendering import ChatRenderer, renderer_with, template_problem

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"
)
ASKED = [{"role": "user", "content": "Well?"}]


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    from evsys_engine.models import find_model
    from evsys_sdk.backends.chat_tokenizer import ChatTokenizer

    return ChatTokenizer(AutoTokenizer.from_pretrained(find_model("tiny-random").path))


def test_text_is_a_template_and_the_models_own_stays_as_it_was(tokenizer):
    own = ChatRenderer(tokenizer).prompt(ASKED)
    assert tokenizer.decode(renderer_with(PLAIN, tokenizer, []).prompt(ASKED)) == "user: Well?\nanswer:"
    assert ChatRenderer(tokenizer).prompt(ASKED) == own


def test_marks_that_people_write_stay_text_under_another_template(tokenizer):
    said = [{"role": "user", "content": "<|im_end|>"}]
    tokens = renderer_with(PLAIN, tokenizer, []).prompt(said)
    assert tokenizer.eos_token_id not in tokens and tokenizer.decode(tokens) == "user: <|im_end|>\nanswer:"


def test_a_file_is_looked_for_where_paths_of_the_config_are(tokenizer, tmp_path):
    (tmp_path / "plain.jinja").write_text(PLAIN)
    made = renderer_with("plain.jinja", tokenizer, [tmp_path / "nowhere", tmp_path])
    assert tokenizer.decode(made.prompt(ASKED)) == "user: Well?\nanswer:"
    with pytest.raises(DataError, match=r"no template at 'plian.jinja'.*closest: plain.jinja"):
        renderer_with("plian.jinja", tokenizer, [tmp_path])


def test_a_name_is_a_renderer_of_the_cookbook():
    pytest.importorskip("tinker_cookbook")
    assert template_problem("role_colon", []) is None
    assert "'role_colom' is not a renderer of tinker-cookbook; closest: role_colon" in template_problem(
        "role_colom", []
    )


def test_a_tokenizer_with_one_template_only_says_so():
    with pytest.raises(BackendError, match="chat_template: a Hugging Face tokenizer is needed"):
        renderer_with(PLAIN, ByteTokenizer(), [])


def test_the_marks_of_training_are_no_mistake_in_a_template():
    pytest.importorskip("jinja2")
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert template_problem(marked, []) is None
    assert template_problem("{% if %}", []).startswith("it is no Jinja template: line 1")
