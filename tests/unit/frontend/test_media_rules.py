"""The rules for media: which URLs and addresses, which contents. Pure: nothing is fetched."""

from __future__ import annotations

import asyncio
import base64
import struct

import pytest

from dynamo.frontend.base.settings.media import FetchRules
from dynamo.frontend.parts.media.addresses import MediaRefused, check_address, check_url, shown_url
from dynamo.frontend.parts.media.content import Media, read_data_url, read_media
from dynamo.frontend.parts.media.fetcher import MediaCache
from support.cases import each_case
from support.pictures import GIF, JPEG, MP4, RED, WAV, WEBP, data_url, png_of

STRICT = FetchRules()
INTERNAL = FetchRules.of(None, allow_internal=True)
PIXELS = 64_000_000


@each_case(
    "url",
    [
        "file:///etc/passwd", "ftp://a.com/x", "s3://bucket/x", "gopher://a.com", "javascript:1", "//a.com/x", "/etc/passwd", "a.png",
        "http://", "https://", "https:///x", "https:a.com", "http://[::1", "http://a.com:99999/", "http://a.com:x/",
        "https://user:secret@a.com/x", "https://user@a.com/", "https://a.com@127.0.0.1/", "https://@a.com/",
        "http://127.0.0.1/", "http://127.1/", "http://127.0.1/", "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/",
        "http://0177.0.0.1/", "http://0x7f.0x0.0x0.0x1/", "http://00000177.1/", "http://127.0.0.1./", "http://0/", "http://0x/",
        "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/", "http://[fe80::1%25eth0]/", "http://[fd00::1]/",
        "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://8.8.8.8/", "http://169.254.169.254/latest/meta-data",
        "http://localhost/", "http://LOCALHOST/", "http://localhost./", "http://a.localhost/", "http://localhost.localdomain/",
        "http://metadata.google.internal/", "http://metadata/", "http://kubernetes.default.svc/", "http://ip6-localhost/",
        "http://１２７.0.0.1/", "http://ⓛocalhost/", "http://127。0。0。1/", "http://loc\talhost/", "http://a.com/\r\nHost: b",
        "http://a.com\\@127.0.0.1/", "http://a b.com/", "http://a..com/", "http://-a.com/", "http://a%2ecom/", "http://a.com:8080/",
        "https://a.com:80/", "http://a.com:0/", "http://a.com/" + "x" * 9000, "http://" + "a." * 200 + "com/",
    ],
)  # fmt: skip
def test_a_url_that_may_not_be_fetched_is_refused(url: str) -> None:
    with pytest.raises(MediaRefused):
        check_url(url, STRICT)


def test_a_public_url_is_taken_apart_for_the_wire() -> None:
    target = check_url("HTTPS://Example.COM.:443/a b?q=ü#frag".replace(" ", "%20"), STRICT)
    assert target == ("https", "example.com", 443, "/a%20b?q=%C3%BC", None)
    assert target.authority == "example.com"  # type: ignore[attr-defined]
    assert check_url("http://bücher.example", STRICT)[1:4] == ("xn--bcher-kva.example", 80, "/")


def test_an_operator_may_allow_what_is_internal() -> None:
    assert check_url("http://127.0.0.1:8080/x", INTERNAL) == ("http", "127.0.0.1", 8080, "/x", "127.0.0.1")
    assert check_url("http://[::1]:81/x", INTERNAL).authority == "[::1]:81"
    check_url("http://localhost:1/", INTERNAL)
    for url in ("http://127.1/", "http://u:p@127.0.0.1/", "ftp://127.0.0.1/", "http://0x7f.1/"):
        with pytest.raises(MediaRefused):
            check_url(url, INTERNAL)


def test_only_listed_hosts_where_there_is_a_list() -> None:
    rules = FetchRules.of({"allowed_media_domains": ["Cdn.Example.com"]}, allow_internal=False)
    check_url("https://cdn.example.com/x", rules)
    for host in ("example.com", "a.cdn.example.com", "cdn.example.com.evil.org"):
        with pytest.raises(MediaRefused, match="not among those"):
            check_url(f"https://{host}/x", rules)


@each_case(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "198.18.0.1", "192.0.2.1", "::1", "::", "168.63.129.16", "192.88.99.1", "100::1", "3fff::1", "5f00::1", "fec0::1", "feff::1", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:8.8.8.8",
        "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "2001:0:1::1", "::7f00:1", "no address", "",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    with pytest.raises(MediaRefused):
        check_address(address, STRICT)


def test_public_addresses_pass() -> None:
    for address in ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"):
        check_address(address, STRICT)
    check_address("127.0.0.1", INTERNAL)
    with pytest.raises(MediaRefused):
        check_address("224.0.0.1", INTERNAL)


def test_a_shown_url_holds_neither_payload_nor_key() -> None:
    assert shown_url(data_url(RED)) == f"data:image/png ({len(data_url(RED))} chars)"
    assert shown_url("https://a.com/b.png?signature=secret#x") == "https://a.com/b.png"
    assert "secret" not in shown_url("https://u:secret@a.com/x")
    assert len(shown_url("https://a.com/" + "x" * 5000)) < 250


@each_case(
    ("fetcher", "expected"),
    [
        (None, STRICT),
        ({"timeout": {"secs": 2, "nanos": 500_000_000}}, FetchRules(timeout_seconds=2.5)),
        ({"timeout_ms": 250}, FetchRules(timeout_seconds=0.25)),
        ({"timeout": {"secs": 10**9, "nanos": 0}}, FetchRules(timeout_seconds=300.0)),
        ({"user_agent": "a\r\nX: y", "allow_private_ips": "yes", "timeout": 3}, STRICT),
        (
            {"allow_direct_ip": True, "allow_direct_port": True},
            FetchRules(allow_direct_ip=True, allow_direct_port=True),
        ),
        ({"allowed_media_domains": "a.com"}, FetchRules(allowed_domains=frozenset())),
    ],
)
def test_the_rules_of_a_card(fetcher: object, expected: FetchRules) -> None:
    assert FetchRules.of(fetcher, allow_internal=False) == expected


# -- contents ----------------------------------------------------------------------------------------------------------


@each_case(
    ("data", "kind", "mime", "size"),
    [
        (RED, "image", "image/png", (8, 8)),
        (GIF, "image", "image/gif", (3, 2)),
        (JPEG, "image", "image/jpeg", (7, 5)),
        (WEBP, "image", "image/webp", (9, 4)),
        (WAV, "audio", "audio/wav", (0, 0)),
        (b"ID3" + b"\0" * 20, "audio", "audio/mpeg", (0, 0)),
        (b"\xff\xfb" + b"\0" * 20, "audio", "audio/mpeg", (0, 0)),
        (b"fLaC" + b"\0" * 20, "audio", "audio/flac", (0, 0)),
        (b"OggS" + b"\0" * 20, "audio", "audio/ogg", (0, 0)),
        (MP4, "video", "video/mp4", (0, 0)),
        (b"\x1a\x45\xdf\xa3" + b"\0" * 20, "video", "video/webm", (0, 0)),
    ],
)
def test_the_format_is_told_by_the_first_bytes(data: bytes, kind: str, mime: str, size: tuple[int, int]) -> None:
    media = read_media(data, kind, max_pixels=PIXELS, given_url=data_url(data, "text/html"))
    assert media.url == data_url(data, mime)
    assert (media.width, media.height) == size


def test_webp_sizes_of_all_three_headers() -> None:
    lossless = b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + struct.pack("<I", (99 - 1) | (50 - 1) << 14)
    lossy = b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 99, 50)
    for data in (lossless, lossy):
        media = read_media(data, "image", max_pixels=PIXELS)
        assert (media.width, media.height) == (99, 50)


@each_case(
    ("data", "kind"),
    [
        (b"", "image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image"),
        (b'<!DOCTYPE svg [<!ENTITY a "b">]><svg>&a;</svg>', "image"),
        (b"%PDF-1.7", "image"),
        (b"PK\x03\x04" + b"\0" * 30, "image"),
        (b"\x1f\x8b\x08" + b"\0" * 30, "image"),
        (WAV, "image"),
        (RED, "audio"),
        (RED, "video"),
        (WAV, "video"),
        (RED[:20], "image"),
        (GIF[:7], "image"),
        (JPEG[:20], "image"),
        (b"\xff\xd8\xff" + b"\xff" * 100_000, "image"),
        (b"\xff\xd8" + b"\xff\xe0\0\x02" * 100_000, "image"),
        (b"\xff\xd8\xff\xe0\0\0", "image"),
        (b"RIFF\0\0\0\0WEBPVP9 " + b"\0" * 30, "image"),
        (png_of(0, 5, b""), "image"),
        (png_of(10_000, 10_000, b""), "image"),
        (png_of(2**31 - 1, 2**31 - 1, b""), "image"),
        (b"GIF89a\xff\xff\xff\xff" + b"\0" * 8, "image"),
    ],
)
def test_a_content_that_is_not_what_it_should_be_is_refused(data: bytes, kind: str) -> None:
    with pytest.raises(MediaRefused):
        read_media(data, kind, max_pixels=PIXELS)


@each_case(
    "url",
    ["data:", "data:,", "data:image/png,AA", "data:image/png;base64", "data:image/png;base64,@@", "data:;base64,A", "data:;base64,AA==x"],
)  # fmt: skip
def test_a_data_url_must_be_base64(url: str) -> None:
    with pytest.raises(MediaRefused):
        read_data_url(url, 1000)


def test_a_data_url_has_a_limit() -> None:
    url = data_url(b"x" * 1000)
    assert read_data_url(url, len(url)) == b"x" * 1000
    with pytest.raises(MediaRefused, match=r"URL is \d+ bytes, exceeds the 100-byte limit.*DYN_MM_MAX_DATA_URL_MB"):
        read_data_url(url, 100)


# -- the cache -----------------------------------------------------------------------------------------------------------


def media(content: bytes) -> Media:
    return Media("data:image/png;base64," + base64.b64encode(content).decode(), 1, content, len(content))


def test_the_cache_is_bounded_and_forgets_what_is_old() -> None:
    now = 0.0
    cache = MediaCache(200, 60.0, lambda: now)
    assert cache.add("a", media(b"a" * 30), "") is cache.find("a")
    assert cache.add("b", media(b"a" * 30), "") is cache.find("a")  # one content, two URLs
    assert cache.bytes == len(media(b"a" * 30).url)
    for number in range(50):
        cache.add(number, media(b"%030d" % number), "")
    assert cache.bytes <= 200
    assert cache.find("a") is None
    assert cache.find(49) is not None
    now = 61.0
    assert cache.find(49) is None


def test_an_owner_makes_room_among_its_own_where_it_has_most() -> None:
    cache = MediaCache(400, 60.0, lambda: 0.0)
    cache.add("theirs", media(b"t" * 30), "", "b")
    for number in range(50):
        cache.add(number, media(b"%030d" % number), "", "a")
    assert cache.find("theirs") is not None
    assert cache.find(49) is not None
    assert cache.find(40) is None
    assert cache.bytes <= 400
    for number in range(50, 100):
        cache.add(number, media(b"%030d" % number), "", f"owner {number}")  # many owners: none has more than one
    assert cache.bytes == sum(asyncio.run(cache.count()).values()) <= 400


@each_case(
    ("header", "seconds"),
    [("", 60), ("max-age=5", 5), ("public, max-age=99999", 60), ("no-store", 0), ("private, max-age=9", 0), ("no-cache", 0), ("x", 60)],
)  # fmt: skip
def test_a_server_may_shorten_how_long_its_answer_is_kept(header: str, seconds: float) -> None:
    now = 0.0
    cache = MediaCache(200, 60.0, lambda: now)
    cache.add("a", media(b"a"), header)
    now = seconds - 0.1
    assert (cache.find("a") is not None) == (seconds > 0)
    now = seconds
    assert cache.find("a") is None
