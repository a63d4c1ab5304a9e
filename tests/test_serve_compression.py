"""Bodies in gzip and deflate: every member is read, within the bounds of what is made of them."""

import gzip
import json
import zlib
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from artifacts import write_artifact
from hypothesis import given
from hypothesis import strategies as st
from served import request_of, running

from laconic.errors import InputError
from serve.asgi.body import MEMBERS, UNPACKED, unpack
from serve.requests.memory_budget import BodyTooLarge

INFER = "/v2/models/twice/infer"
LIMIT = 1 << 20
GOOD = json.dumps(request_of([[1, 2, 3]])).encode()


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = write_artifact(tmp_path_factory.mktemp("artifacts") / "twice.laconic")
    with running(path, max_body=LIMIT) as server, server.client() as client:
        yield client


def post(http: httpx.Client, body: bytes, coding: str = "gzip") -> httpx.Response:
    return http.post(INFER, content=body, headers={"content-encoding": coding})


def test_a_gzip_body_of_several_members_is_read_whole(http: httpx.Client) -> None:
    for cut in (0, 1, 20, len(GOOD)):
        answer = post(http, gzip.compress(GOOD[:cut]) + gzip.compress(b"") + gzip.compress(GOOD[cut:]))
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][0]["data"] == [2, 4, 6]


def test_what_follows_the_first_member_is_bounded_and_checked(http: httpx.Client) -> None:
    half = gzip.compress(b" " * (LIMIT // 2))
    assert post(http, half + half).status_code == 400  # it is not JSON, but not too large
    assert post(http, half + half + gzip.compress(b" ")).status_code == 413
    for tail in (b"x", b"\0" * 30, gzip.compress(b" ")[:-1], zlib.compress(b" ")):
        assert post(http, gzip.compress(GOOD) + tail).status_code == 400


def test_a_deflate_body_has_one_part(http: httpx.Client) -> None:
    assert post(http, zlib.compress(GOOD), "deflate").status_code == 200
    refused = post(http, zlib.compress(GOOD) + zlib.compress(b" "), "deflate")
    assert refused.status_code == 400
    assert "goes on behind its end" in refused.json()["error"]


@given(st.lists(st.sampled_from([0, 1, 300, UNPACKED, 3 * UNPACKED + 1]), min_size=1, max_size=6))
def test_members_of_any_size_are_put_together(sizes: list[int]) -> None:
    parts = [np.random.default_rng(size).bytes(size) for size in sizes]
    members = [gzip.compress(part, 1) for part in parts]
    body, whole = b"".join(members), b"".join(parts)
    assert unpack(body, b"gzip", len(whole)) == whole
    if whole:
        with pytest.raises(BodyTooLarge):
            unpack(body, b"gzip", len(whole) - 1)
    for missing in (1, len(members[-1]) - 1):
        with pytest.raises(InputError, match="ends too early"):
            unpack(body[:-missing], b"gzip", len(whole))


def test_a_body_of_countless_members_is_refused() -> None:
    member = gzip.compress(b"")
    assert unpack(member * MEMBERS, b"gzip", 10) == b""
    with pytest.raises(InputError, match=f"more than {MEMBERS} members"):
        unpack(member * (MEMBERS + 1), b"gzip", 10)
