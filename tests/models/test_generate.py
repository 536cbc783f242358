from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runner.errors import RunnerError
from runner.inspection.host_reads import HostReads
from runner.models.generate import TEMPERATURE, generate, sample
from runner.models.gpt import GPT
from runner.models.preprocessing import Prepared

CPU = torch.device("cpu")


class Chances(nn.Module):
    """Returns the same probabilities after any text, and records its inputs."""

    def __init__(self, *chances, context_length=None):
        super().__init__()
        self.logits, self.shown, self.was_training = torch.tensor(chances).log(), [], []
        if context_length:
            self.context_length = context_length

    def forward(self, tokens):
        self.shown.append(tokens.clone())
        self.was_training.append(self.training)
        return SimpleNamespace(logits=self.logits.expand(*tokens.shape, -1))


def drawn(model, num_tokens, rows=1):
    prompt = torch.zeros(rows, 1, dtype=torch.int64)
    return generate(model, prompt, num_tokens, generator=torch.Generator().manual_seed(0))[:, 1:]


def shares(tokens, count):
    return tokens.flatten().bincount(minlength=count) / tokens.numel()


def test_tokens_are_drawn_by_their_probability():
    chances = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0])
    found = shares(drawn(Chances(*(chances**TEMPERATURE).tolist()), 50, rows=400), 5)
    assert (found - chances).abs().max() < 0.01
    assert found[1] == found[4] == 0, "what is impossible never comes"


@pytest.mark.parametrize("inside", [lambda model: model, lambda model: Prepared(model)])
def test_generated_context_is_bounded(inside):
    model = Chances(0.5, 0.5, context_length=4)
    prompt = torch.tensor([[0, 1, 1, 0, 1, 0]])
    found = generate(inside(model), prompt, 3)
    assert torch.equal(found[:, :6], prompt) and found.shape == (1, 9)
    for index, shown in enumerate(model.shown):
        assert torch.equal(shown, found[:, 2 + index : 6 + index])
    bare = Chances(0.5, 0.5)
    generate(bare, prompt, 3)
    assert [shown.shape[1] for shown in bare.shown] == [6, 7, 8]


def test_model_generates_in_evaluation_mode():
    model = Chances(0.5, 0.5)
    drawn(model, 2)
    assert model.was_training == [False, False] and model.training
    drawn(model.eval(), 1)
    assert not model.training


def test_the_seed_decides_and_rows_differ():
    torch.manual_seed(0)
    model = GPT(7, 8, 16, 1, 2)
    torch.manual_seed(5)
    first = drawn(model, 30, rows=3)
    torch.manual_seed(6)
    assert torch.equal(drawn(model, 30, rows=3), first)
    assert not torch.equal(first[0], first[1])


def test_nothing_of_the_device_is_read(device):
    torch.manual_seed(0)
    model = GPT(7, 8, 16, 1, 2).to(device)
    prompt = torch.tensor([[3, 4]], device=device)
    with HostReads(device) as watch:
        generate(model, prompt, 12)
    assert [str(read) for read in watch.reads if "a copy from the host" not in str(read)] == []
    assert len(watch.reads) <= 1, "the draws, at once"


class Letters:
    def encode(self, text):
        if "?" in text:
            raise RunnerError()
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)


def test_a_text_to_look_at():
    model = Chances(0.0, 0.5, 0.5)
    said = sample(model, Letters(), prompt="ab", num_tokens=40, seed=3)
    assert said.startswith("ab") and len(said) == 42 and set(said[2:]) == {"b", "c"}
    assert said == sample(model, Letters(), prompt="ab", num_tokens=40, seed=3)
    assert said != sample(model, Letters(), prompt="ab", num_tokens=40, seed=4)
    assert sample(model, Letters(), prompt="?", num_tokens=3)[0] == "a"
    assert len(sample(model, Letters(), prompt="", num_tokens=3)) == 4
