"""The real transformers package with small configurations; timm, which need not be installed, as a replacement with its functions."""

import importlib.util
import json
import sys
import types

import pytest
import torch
from refused import problems_of
from torch import nn

from runner.config.instantiate import build
from runner.config.packages import install
from runner.inspection.host_reads import HostReads
from runner.models import external
from runner.models.weights import load_weights

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BERT = {"model_type": "bert", **TINY}
GPT = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 12,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
VIT = {"model_type": "vit", **TINY, "patch_size": 4}
CASES = {
    "bert": (BERT, (7,), 3, 11, (5, 3)),
    "gpt classifies": ({**GPT}, (7,), 3, 11, (5, 3)),
    "gpt": (GPT, (7,), 11, 11, (5, 7, 11)),
    "vit": (VIT, (2, 8, 8), 3, None, (5, 3)),
}
needs_transformers = pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is an extra")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Make no request to the hub; transformers reads the variable when it is imported, and would try five times."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def made(name):
    config, shape, outputs, vocab_size, expected = CASES[name]
    torch.manual_seed(0)
    model = external.transformers_model(shape, outputs, config=config, vocab_size=vocab_size)
    torch.manual_seed(1)
    inputs = torch.randint(vocab_size, (5, *shape)) if vocab_size else torch.randn(5, *shape)
    return model, inputs, expected


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_configuration_becomes_a_model_that_learns(name):
    model, inputs, expected = made(name)
    logits = model(inputs)
    assert (logits.shape, logits.dtype) == (expected, torch.float32)
    targets = torch.zeros(expected[:-1], dtype=torch.int64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_model_is_built_again_without_download(name):
    model, inputs, _ = made(name)
    node = json.loads(json.dumps(model.made_anywhere))
    again = build(node)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(inputs), model.eval()(inputs))


@needs_transformers
@pytest.mark.filterwarnings("ignore")
def test_a_local_folder_with_another_output_layer(tmp_path):
    first, tokens, _ = made("bert")
    first.model.save_pretrained(tmp_path)
    again = external.transformers_model((7,), 3, pretrained=str(tmp_path), vocab_size=11)
    assert torch.equal(again.eval()(tokens), first.eval()(tokens))
    other = external.transformers_model((7,), 9, pretrained=str(tmp_path), vocab_size=11)
    assert other(tokens).shape == (5, 9)
    assert torch.equal(
        other.model.bert.embeddings.word_embeddings.weight, first.model.bert.embeddings.word_embeddings.weight
    )
    assert "pretrained" not in other.made_anywhere
    assert other.made_anywhere["config"]["hidden_size"] == 16
    fresh = external.transformers_model((7,), 3, config=BERT, vocab_size=11)
    load_weights(fresh, str(tmp_path / "model.safetensors"), strict=True)  # their names, ours with a prefix
    assert torch.equal(fresh.eval()(tokens), first(tokens))


@needs_transformers
@pytest.mark.filterwarnings("ignore")
def test_only_safetensors_and_no_code_of_others(tmp_path, messages):
    first, _, _ = made("bert")
    first.model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(first.model.state_dict(), tmp_path / "pytorch_model.bin")
    messages(problems_of(external.transformers_model, (7,), 3, pretrained=str(tmp_path), vocab_size=11))
    (tmp_path / "theirs.py").write_text("raise SystemExit('code ran')")
    theirs = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    messages(problems_of(external.transformers_model, (7,), 3, pretrained=str(tmp_path), vocab_size=11))


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((7,), {"config": {"model_type": "bret"}, "vocab_size": 9}),
        ((7,), {"vocab_size": 9}),
        ((7,), {"config": BERT}),
        ((7,), {"pretrained": "no/where", "vocab_size": 9}),
    ],
    ids=str,
)
def test_what_it_is_not(shape, settings, monkeypatch, messages):
    # otherwise it repeats its requests to the hub
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    messages(problems_of(external.transformers_model, shape, 3, **settings))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("timm", lambda: external.timm_model("resnet18", (3, 8, 8), 3)),
        ("transformers", lambda: external.transformers_model((7,), 3, config=BERT, vocab_size=9)),
    ],
)
def test_a_library_that_is_not_installed(name, make, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    assert install(name) in problems_of(make)[0].help


@pytest.fixture
def timm(monkeypatch):
    """The functions of timm that are used, according to its documentation."""

    def create_model(model_name, pretrained=False, *, num_classes, in_chans, **settings):
        if pretrained:
            raise OSError("no network")
        model = nn.Sequential(
            nn.Conv2d(in_chans, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
        )
        model.given = settings
        return model

    names = ["resnet18", "vit_tiny_patch16_224"]
    stand_in = types.SimpleNamespace(
        create_model=create_model, list_models=lambda: names, is_model=lambda name: name.split(".")[0] in names
    )
    monkeypatch.setitem(sys.modules, "timm", stand_in)


def test_timm_by_name(timm):
    model = external.timm_model("resnet18", (2, 8, 8), 3, settings={"drop_rate": 0.1})
    assert model(torch.zeros(5, 2, 8, 8)).shape == (5, 3)
    assert model.given == {"drop_rate": 0.1}
    again = build(json.loads(json.dumps(model.made_anywhere)))
    again.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "shape", "settings"),
    [
        ("resnet19", (3, 8, 8), {}),
        ("hf-hub:someone/resnet18", (3, 8, 8), {}),
        ("resnet18", (8,), {}),
        ("resnet18", (3, 8, 8), {"settings": {"checkpoint_path": "w.pt"}}),
        ("resnet18", (3, 8, 8), {"pretrained": True}),
    ],
    ids=str,
)
def test_what_timm_has_not(name, shape, settings, timm, messages):
    messages(problems_of(external.timm_model, name, shape, 3, **settings))


def test_too_small_vocabulary_is_refused(messages):
    pytest.importorskip("transformers")
    config = {**BERT, "vocab_size": 8}
    messages(problems_of(external.transformers_model, (7,), 3, config=config, vocab_size=257))


@needs_transformers
@pytest.mark.parametrize("kind", ["bert", "distilbert", "deberta-v2", "xlnet"])
def test_an_encoder_does_not_look_at_padding(kind):
    tiny = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16} if kind == "distilbert" else TINY
    tiny = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16} if kind == "xlnet" else tiny
    model = external.transformers_model(
        (7,), 3, config={"model_type": kind, **tiny}, vocab_size=9, padding_token=8
    ).eval()
    with torch.no_grad():
        for values in model.parameters():
            values *= 20 if values.dim() > 1 else 1  # an untrained model hardly depends on its inputs
    texts = torch.tensor([[1, 2, 3, 8, 8, 8, 8], [8] * 7])
    watch = HostReads(torch.device("cpu"))
    with watch:
        said = model(texts)
    torch.testing.assert_close(said[:1], model(texts[:1, :3]), atol=1e-4, rtol=1e-4)
    assert said.isfinite().all() and not watch.reads


@needs_transformers
def test_type_that_uses_padding_gives_warning(caplog):
    for padding_token in (None, 8):
        external.transformers_model(
            (7,), 3, config={"model_type": "fnet", **TINY}, vocab_size=9, padding_token=padding_token
        )
    (told,) = (record.getMessage() for record in caplog.records if record.name == "runner")
    assert (
        "the outputs of a model of type fnet depend on the padding of a text" in told and "data.context_length" in told
    )


@needs_transformers
def test_padding_token_above_positions_gets_room():
    config = {"model_type": "roberta", **TINY}  # 512 positions
    model = external.transformers_model((7,), 3, config=config, vocab_size=601, padding_token=600)
    assert model(torch.tensor([[1, 2, 3, 600, 600, 600, 600]])).shape == (1, 3)
    assert model.made_anywhere["config"]["max_position_embeddings"] == 608


LOCAL = {**TINY, "num_hidden_layers": 2, "local_attention": 4, "global_attn_every_n_layers": 2}


@needs_transformers
@pytest.mark.parametrize(
    "config",
    [
        BERT,
        {**GPT, "n_positions": 24, "n_layer": 2},
        {**BERT, "attn_implementation": "eager"},
        {"model_type": "mpnet", **TINY},
        {"model_type": "esm", **TINY, "mask_token_id": 7, "token_dropout": True},
        {"model_type": "modernbert", **LOCAL},
        {"model_type": "modernbert", **LOCAL, "classifier_pooling": "mean"},
        {"model_type": "eurobert", **TINY, "classifier_pooling": "mean"},
    ],
    ids=["bert", "gpt", "eager", "mpnet", "esm", "modernbert", "modernbert's mean", "eurobert's mean"],
)
def test_whole_mask_equals_the_models_mask(config):
    torch.manual_seed(0)
    model = external.transformers_model((24,), 3, config=config, vocab_size=9, padding_token=8).eval()
    with torch.no_grad():
        for values in model.parameters():
            values *= 20 if values.dim() > 1 else 1
    texts = torch.randint(0, 7, (2, 24))
    texts[1, 20:] = 8
    theirs = model.model(input_ids=texts, attention_mask=(texts != 8).long()).logits
    torch.testing.assert_close(model(texts), theirs, atol=1e-4, rtol=1e-4)


@needs_transformers
def test_decoder_classifies_at_last_real_token():
    model = external.transformers_model((7,), 3, config=GPT, vocab_size=9, padding_token=8).eval()
    texts = torch.tensor([[1, 2, 3, 8, 8, 8, 8]])
    torch.testing.assert_close(model(texts), model(texts[:, :3]), atol=1e-6, rtol=1e-5)
    again = build(model.made_anywhere, key="model")
    assert again.model.config.pad_token_id == 8


@needs_transformers
def test_pretrained_decoder_takes_padding_of_data(tmp_path):
    made = external.transformers_model((7,), 3, config={**GPT, "pad_token_id": 5}, vocab_size=9)
    made.model.config.pad_token_id = 5
    made.model.save_pretrained(tmp_path)
    model = external.transformers_model((7,), 3, pretrained=str(tmp_path), vocab_size=9, padding_token=8).eval()
    texts = torch.tensor([[1, 2, 3, 8, 8, 8, 8]])
    torch.testing.assert_close(model(texts), model(texts[:, :3]), atol=1e-6, rtol=1e-5)


@needs_transformers
@pytest.mark.parametrize(
    "config",
    [
        GPT,
        {"model_type": "llama", **TINY},
        {**GPT, "model_type": "openai-gpt"},
        {"model_type": "bloom", "n_layer": 1, "n_head": 2, "hidden_size": 16},
    ],
    ids=["gpt2", "llama", "openai-gpt", "bloom"],
)
def test_decoder_without_padding_classifies_at_the_end(config):
    model = external.transformers_model((4,), 3, config=config, vocab_size=9).eval()
    texts = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 4]])
    model_again = build(json.loads(json.dumps(model.made_anywhere)))
    model_again.load_state_dict(model.state_dict())
    for each in (model, model_again.eval()):
        assert (each(texts)[0] - each(texts[:, :3])[0]).abs().max() > 1e-6
        torch.testing.assert_close(each(texts)[:1], each(texts[:1]), atol=1e-6, rtol=1e-5)


@needs_transformers
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_every_token_is_learned_without_padding(kind):
    model = external.transformers_model((4,), 3, config={"model_type": kind, **TINY}, vocab_size=4)
    model(torch.tensor([[0, 1, 2, 3]])).sum().backward()
    gradients = model.model.base_model.embeddings.word_embeddings.weight.grad
    assert (gradients.abs().sum(1) > 0).all()


@needs_transformers
def test_positions_have_room_behind_padding_token():
    config = {"model_type": "roberta", **TINY}
    model = external.transformers_model((256,), 3, config=config, vocab_size=257, padding_token=256)
    texts = torch.full((1, 256), 65)
    assert model(texts).shape == (1, 3)
    again = build(json.loads(json.dumps(model.made_anywhere)))
    again.load_state_dict(model.state_dict())
    mpnet = external.transformers_model(
        (256,), 3, config={**config, "model_type": "mpnet"}, vocab_size=257, padding_token=256
    )
    assert mpnet.model.config.max_position_embeddings == 512, "its positions begin behind token 1"
    config["max_position_embeddings"] = 520
    source = external.transformers_model((9,), 3, config=config, vocab_size=257, padding_token=256)
    assert source.model.config.max_position_embeddings == 520


@needs_transformers
def test_all_misspelled_keys_are_reported(messages):
    config = {**BERT, "num_hidden_layer": 3, "hiden_size": 16, "theirs_alone": 1}
    messages(problems_of(external.transformers_model, (7,), 3, config=config, vocab_size=9))


@needs_transformers
@pytest.mark.parametrize(
    "config",
    [
        {**BERT, "attn_implementation": "eager", "dtype": "float32", "problem_type": None, "num_labels": 3},
        {"model_type": "llama", **TINY, "rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"model_type": "gpt2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    ],
    ids=["words of the library", "rotary", "names that stand for others"],
)
def test_keys_of_configuration_are_accepted(config):
    assert external.transformers_model((7,), 3, config=config, vocab_size=9).model.config.num_hidden_layers == 1


@needs_transformers
def test_saved_directory_with_settings_is_built_again(tmp_path):
    made("bert")[0].model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "theirs_alone": 1}))
    model = external.transformers_model((7,), 3, pretrained=str(tmp_path), vocab_size=11)
    assert "theirs_alone" in model.made_anywhere["config"]
    build(json.loads(json.dumps(model.made_anywhere)))
