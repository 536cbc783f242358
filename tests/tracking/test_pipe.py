import json
import time
from pathlib import Path

import pytest

from runner.tracking import pipe as module
from runner.tracking.pipe import FOLLOW, GONE, bye, word


def closed(line):
    line.wait_for_end(10)
    return line.closed_at is not None


@pytest.mark.parametrize("name", ["0", "my run", "two\nlines", 'a "b" \\', "größe", "\udcff", "bye 5"])
def test_every_path_gets_through_and_the_order_stays(pipe, name):
    line, folder = pipe.line(), Path("/runs") / name
    pipe.say(word(FOLLOW, folder) + b"\n" + word(GONE, folder) + word(FOLLOW, folder))
    pipe.close()
    assert closed(line)
    assert list(line.words()) == [(FOLLOW, folder), (GONE, folder), (FOLLOW, folder)] and list(line.words()) == []


def test_words_come_in_any_pieces(pipe):
    line = pipe.line(grace_seconds=7)
    for byte in word(FOLLOW, Path("/a")) + bye(2.5):
        pipe.say(bytes([byte]))
    assert closed(line) and list(line.words()) == [(FOLLOW, Path("/a"))] and line.grace_seconds == 2.5


def test_a_goodbye_without_a_number_keeps_the_grace(pipe):
    line = pipe.line(grace_seconds=7)
    pipe.say(bye(None))
    assert closed(line) and line.grace_seconds == 7


@pytest.mark.parametrize("nonsense", [b"sing", b"follow", b"follow /a", b"gone \xff", b"bye bye"])
def test_a_word_that_makes_no_sense_harms_no_other(pipe, nonsense, caplog):
    line = pipe.line()
    pipe.say(nonsense + b"\n" + word(GONE, Path("/a")) + bye(None))
    assert closed(line) and list(line.words()) == [(GONE, Path("/a"))]
    assert "unknown line" in caplog.text


def test_a_word_is_one_line_of_json():
    kind, _, rest = word(FOLLOW, Path("/a b")).decode().partition(" ")
    assert kind == "follow" and json.loads(rest) == "/a b"


def test_news_end_a_wait_and_are_heard_once(pipe):
    line = pipe.line()
    pipe.say(module.NEWS)
    began = time.monotonic()
    line.wait(60)
    assert time.monotonic() - began < 60
    line.wait(0.01)
    assert line.closed_at is None


def test_it_rests_between_two_sendings_until_the_training_is_over(pipe):
    line = pipe.line()
    began = time.monotonic()
    line.rest(0.02)
    assert time.monotonic() - began >= 0.02 * module.RESTS_PER_WORK
    pipe.close()
    line.rest(60)
    assert time.monotonic() - began < 60


def test_in_a_sweep_it_does_not_rest(pipe, tmp_path):
    line = pipe.line()
    pipe.say(module.word(module.FOLLOW, tmp_path))
    line.wait(60)
    began = time.monotonic()
    line.rest(60)
    assert time.monotonic() - began < module.LONGEST_REST_SECONDS and line.closed_at is None
