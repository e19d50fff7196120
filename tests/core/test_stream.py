"""Streaming: the text of `generate` in pieces, none of which ends inside a character."""

import numpy as np
import pytest

import treegraft
from treegraft import PipelineBusyError, RequestError
from treegraft.testing import MarkovTarget, ScriptedDrafter

TEXT = "a𝄞b€"  # no byte twice, characters of one, four and three bytes


class ByteTokenizer:
    """One token a byte; what is no character (yet) decodes to U+FFFD, as real byte-level tokenizers do."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return bytes(ids).decode(errors="replace")


def reciting(text: bytes, num_right: int | None) -> treegraft.Pipeline:
    """A pipeline whose target recites `text`, in which no byte comes twice, in a circle."""
    tokens = list(text)
    assert len(set(tokens)) == len(tokens)
    table = np.zeros((256, 256))
    table[tokens, tokens[1:] + tokens[:1]] = 9.0
    models = {"target": MarkovTarget(table), "middle": ScriptedDrafter(tokens * 4, num_right)}
    sizes = ("sources.middle.branching=2", "costs={use: fixed}")
    return treegraft.load("all_middle", *sizes, models=models, tokenizer=ByteTokenizer())


def all_of(stream):
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


@pytest.mark.parametrize("num_right", [0, 1, 2, 3, None])
@pytest.mark.parametrize("length", range(12))
def test_pieces_are_whole_characters_and_add_up(num_right, length):
    """At any block length, and wherever the output is cut off."""
    pipeline = reciting(TEXT.encode(), num_right)
    pieces, generation = all_of(pipeline.stream("a", max_new_tokens=length))
    assert "".join(pieces) == generation.text
    assert generation.text == bytes(generation.token_ids).decode(errors="replace")
    assert generation.token_ids == (list(TEXT.encode()) * 2)[1 : length + 1]
    assert all(pieces) and all("\ufffd" not in piece for piece in pieces[:-1])


def test_text_comes_before_the_end():
    pieces, _ = all_of(reciting(b"abcdefghij", 2).stream("a", max_new_tokens=20))
    assert pieces[0] == "bcd" and len(pieces) > 5


def test_a_stream_is_a_request_like_any_other():
    pipeline = reciting(b"abcdefghij", 2)
    with pytest.raises(RequestError, match="max_new_tokens"):
        pipeline.stream("a", max_new_tokens=-1)
    stream = pipeline.stream("a", max_new_tokens=20)
    next(stream)
    with pytest.raises(PipelineBusyError):
        pipeline.generate("a")
    stream.close()
    assert pipeline.generate("a", max_new_tokens=4).text == "bcde"


def test_streaming_needs_a_tokenizer():
    pipeline = treegraft.load("plain", models={"target": MarkovTarget(np.zeros((3, 3)))})
    with pytest.raises(RequestError, match="tokenizer"):
        pipeline.stream([0])
