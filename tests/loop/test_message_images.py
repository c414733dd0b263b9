"""Images: four media types, valid base64, and no data in the repr."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import Image, Message

PNG = b"\x89PNG\r\n\x1a\n and more"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0...", "image/jpeg"),
        (b"GIF89a...", "image/gif"),
        (b"RIFF....WEBPVP8 ", "image/webp"),
    ],
)
def test_the_media_type_is_detected_from_the_first_bytes(content: bytes, kind: str) -> None:
    assert Image.from_bytes(content).media_type == kind


@pytest.mark.parametrize("content", [b"", b"<svg/>", b"BM...", b"RIFF....WAVEfmt "])
def test_what_no_provider_takes_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="that models accept: image/gif, image/jpeg, image/png, image/webp"):
        Image.from_bytes(content)
    with pytest.raises(ValueError, match=", not 'image/svg"):
        Image.from_bytes(b"<svg/>", "image/svg+xml")


@pytest.mark.parametrize("data", ["", "%%%%", "YQ", "YQ==\n", "YQ==YQ==", "\u00fc"])
def test_data_that_is_no_base64_is_refused(data: str) -> None:
    with pytest.raises(ValueError, match="the image"):
        Image("image/png", data)


@given(st.binary(min_size=1, max_size=50))
def test_it_holds_the_bytes_and_knows_how_many(content: bytes) -> None:
    image = Image.from_bytes(content, "image/png")
    assert base64.b64decode(image.data) == content
    assert image.size == len(content)
    assert image.text_placeholder == f"[image, image/png, {len(content)} bytes]"


def test_nothing_that_it_shows_is_in_its_representation() -> None:
    image = Image.from_bytes(PNG)
    assert image.data not in repr(Message.user("look", [image]))
