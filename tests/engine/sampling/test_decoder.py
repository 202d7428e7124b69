"""The fast decoder against the model's own forward."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from tiny_models import random_lora, tiny

from evsys_engine import merging
from evsys_engine.decoder import BLOCK, LlamaDecoder, ModelDecoder, is_supported
from evsys_engine.merging import MergedWeights
from evsys_engine.scheduler import Snapshots

FAMILY = ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3", "mistral"]
OTHERS = ["mistral-sliding", "gpt2"]
PROMPTS = [[5, 9, 200, 31, 7], [1], [44, 3, 250, 17, 8, 8, 120, 61, 2, 99, 14], [5, 9, 200, 31, 8]]
NEXT = [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34], [41, 42, 43, 44]]


def merged(model, lora):
    """The model with the adapter added to its weights, by hand."""
    model = copy.deepcopy(model)
    for name, (a, b, scale) in lora.items():
        layer = model.get_submodule(name)
        layer.weight = torch.nn.Parameter(layer.weight.detach() + scale * b @ a)
    return model


@torch.no_grad()
def reference(model, tokens):
    """Logits after every token of one sequence."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def decoder_for(kind, model, lora=None, full=None):
    weights = MergedWeights(model, lora, full)
    return LlamaDecoder(model, weights) if kind in FAMILY else ModelDecoder(model, weights.changed_parameters())


def assert_same(ours, theirs):
    torch.testing.assert_close(ours.float(), theirs.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", FAMILY + OTHERS)
def test_logits_are_the_models_own_with_the_adapter_applied(kind):
    model = tiny(kind)
    lora = random_lora(model)
    decoder, truth = decoder_for(kind, model, lora), merged(model, lora)
    read = decoder.prefill(PROMPTS, {}, keep=True)
    for i, prompt in enumerate(PROMPTS):
        assert_same(read.logits[i], reference(truth, prompt)[-1])
    group = read.open([0, 1, 2, 3], room=2)
    for step in range(4):
        logits = decoder.step([group], [row[step] for row in NEXT])
        for i, prompt in enumerate(PROMPTS):
            assert_same(logits[i], reference(truth, prompt + NEXT[i][: step + 1])[-1])


@pytest.mark.parametrize("kind", ["llama", "mistral-sliding"])
def test_dropped_rows_leave_the_others_as_they_were(kind):
    model = tiny(kind)
    decoder = decoder_for(kind, model)
    group = decoder.prefill(PROMPTS, {}, keep=True).open([0, 1, 2, 3], room=8)
    decoder.step([group], [row[0] for row in NEXT])
    order = group.keep([1, 3])
    assert sorted(order) == [1, 3] and group.size == 2
    logits = decoder.step([group], [NEXT[i][1] for i in order])
    for place, i in enumerate(order):
        assert_same(logits[place], reference(model, PROMPTS[i] + NEXT[i][:2])[-1])


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_one_prompt_read_once_serves_many_rows(kind):
    model = tiny(kind)
    decoder = decoder_for(kind, model)
    group = decoder.prefill(PROMPTS[:2], {}, keep=True).open([0, 0, 1, 0], room=8)
    logits = decoder.step([group], [11, 12, 13, 14])
    for place, (i, token) in enumerate([(0, 11), (0, 12), (1, 13), (0, 14)]):
        assert_same(logits[place], reference(model, [*PROMPTS[i], token])[-1])


@pytest.mark.parametrize("kind", ["llama", "mistral-sliding"])
def test_groups_that_began_at_different_times_decode_together(kind):
    model = tiny(kind)
    decoder = decoder_for(kind, model)
    early = decoder.prefill([PROMPTS[0], PROMPTS[1]], {}, keep=True).open([0, 1], room=8)
    decoder.step([early], [NEXT[0][0], NEXT[1][0]])
    late = decoder.prefill([PROMPTS[2]], {}, keep=True).open([0], room=8)
    logits = decoder.step([early, late], [NEXT[0][1], NEXT[1][1], NEXT[2][0]])
    for place, tokens in enumerate([PROMPTS[0] + NEXT[0][:2], PROMPTS[1] + NEXT[1][:2], PROMPTS[2] + NEXT[2][:1]]):
        assert_same(logits[place], reference(model, tokens)[-1])


def test_a_full_cache_grows_without_losing_anything():
    model = tiny("llama")
    decoder = decoder_for("llama", model)
    group = decoder.prefill(PROMPTS[:2], {}, keep=True).open([0, 1], room=1)
    written = [(7 * i) % 300 for i in range(BLOCK + 20)]
    for token in written:
        logits = decoder.step([group], [token, token])
    for i in (0, 1):
        assert_same(logits[i], reference(model, PROMPTS[i] + written)[-1])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_watched_prompt_shows_the_logits_of_all_its_positions_but_the_last(kind, monkeypatch):
    monkeypatch.setattr("evsys_engine.decoder.HEAD_BYTES", 1)  # several pieces
    monkeypatch.setattr("evsys_engine.decoder.LOGITS_BYTES", 1)
    model = tiny(kind)
    long = [(11 * i) % 300 for i in range(50)]
    seen = []
    read = decoder_for(kind, model).prefill(
        [PROMPTS[0], long], {1: lambda position, logits: seen.append((position, logits.clone()))}, keep=False
    )
    truth = reference(model, long)
    assert [position for position, _ in seen] == [sum(len(x) for _, x in seen[:i]) for i in range(len(seen))]
    assert len(seen) > 1
    assert_same(torch.cat([logits for _, logits in seen]), truth[:-1])
    assert_same(read.logits[1], truth[-1])


def test_prompts_beyond_one_chunk_are_read_right(monkeypatch):
    monkeypatch.setattr("evsys_engine.decoder.PREFILL_TOKENS", 6)
    model = tiny("qwen3")
    decoder = decoder_for("qwen3", model)
    read = decoder.prefill(PROMPTS, {}, keep=True)
    assert len(read.chunks) == 3
    logits = decoder.step([read.open([3, 2, 0], room=4)], [1, 2, 3])
    for place, (i, token) in enumerate([(3, 1), (2, 2), (0, 3)]):
        assert_same(logits[place], reference(model, [*PROMPTS[i], token])[-1])


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2"])
def test_an_adapter_on_a_tied_head_leaves_the_embedding_alone(kind):
    model = tiny(kind)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    lora = {"lm_head": random_lora(model, head=True)["lm_head"]}
    read = decoder_for(kind, model, lora).prefill([PROMPTS[0]], {}, keep=False)
    assert_same(read.logits[0], reference(merged(model, lora), PROMPTS[0])[-1])


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2"])
def test_full_weights_replace_the_bases_under_every_tied_name(kind):
    base, other = tiny(kind), tiny(kind)
    for parameter in other.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    full = {name: tensor.detach() for name, tensor in other.named_parameters()}  # a tied weight is there once
    read = decoder_for(kind, base, full=full).prefill([PROMPTS[0]], {}, keep=False)
    assert_same(read.logits[0], reference(other, PROMPTS[0])[-1])


def test_without_packing_the_answers_are_the_same(monkeypatch):
    monkeypatch.setattr(merging, "packs", lambda weight: False)
    model = tiny("qwen2")
    for lora in (None, random_lora(model)):
        read = decoder_for("qwen2", model, lora).prefill(PROMPTS[:1], {}, keep=False)
        assert_same(read.logits[0], reference(merged(model, lora or {}), PROMPTS[0])[-1])


def test_in_bf16_the_answers_stay_close():
    model = tiny("llama").to(torch.bfloat16)
    lora = random_lora(model)
    decoder = decoder_for("llama", model, lora)
    truth = merged(tiny("llama"), lora)
    group = decoder.prefill([PROMPTS[2]], {}, keep=True).open([0], room=4)
    ours, theirs = decoder.step([group], [4])[0].float(), reference(truth, [*PROMPTS[2], 4])[-1]
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.99


def test_what_the_fast_decoder_does_not_compute_is_left_to_the_model():
    assert all(is_supported(tiny(kind)) for kind in FAMILY)
    assert not any(is_supported(tiny(kind)) for kind in OTHERS)
    long_rope = tiny("llama")
    long_rope.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not is_supported(long_rope)


def test_weights_of_another_model_are_refused():
    model = tiny("llama")
    with pytest.raises(Exception, match=r"no model\.layers\.7\.mlp\.up_proj\.weight"):
        MergedWeights(model, {"model.layers.7.mlp.up_proj": (torch.zeros(1, 64), torch.zeros(96, 1), 1.0)})


def test_untouched_matrices_are_shared_by_all_snapshots_and_go_with_the_last():
    model = tiny("llama")
    lora = {name: parts for name, parts in random_lora(model).items() if "q_proj" in name}
    first, second = decoder_for("llama", model), decoder_for("llama", model, lora)
    assert first._head is second._head
    assert first._layers[0].gate_up is second._layers[0].gate_up
    assert first._layers[0].qkv is not second._layers[0].qkv
    head = weakref.ref(first._head)
    del first, second
    gc.collect()
    assert head() is None


def test_only_the_last_used_snapshots_stay_in_memory():
    held = Snapshots(limit=2)
    built = []

    def build(name):
        return held.get(name, lambda: built.append(name) or [name])

    build("a"), build("b"), build("a"), build("c"), build("a")
    assert built == ["a", "b", "c"] and len(held) == 2
    build("b")
    assert built == ["a", "b", "c", "b"]
    held.drop("b")
    assert len(held) == 1
