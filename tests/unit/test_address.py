"""Addresses: user, password and query are in no text of them, whatever a person writes."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_exporter.common.address import FORM, Address, expand_hosts, parse_address


def texts_of(address: Address) -> str:
    return f"{address} {address!r} {address:} {address.page('/a', 'b=1')} {address.at('/c')!r} {[address]}"


@pytest.mark.parametrize(
    ("text", "shown", "query", "login"),
    [
        ("http://host", "http://host", "", ""),
        ("HTTPS://Host:9090/prometheus/", "https://Host:9090/prometheus/", "", ""),
        ("https://ada:s3cret@host/p", "https://host/p", "", "ada:s3cret"),
        ("https://ada:s3@cret@host/p", "https://host/p", "", "ada:s3@cret"),
        ("https://ada:s3%2Fcret@host", "https://host", "", "ada:s3%2Fcret"),
        ("https://@host", "https://host", "", ""),
        ("http://host/metrics?token=s3cret#x", "http://host/metrics", "token=s3cret", ""),
        ("http://ada:s3cret@[::1]:9836", "http://[::1]:9836", "", "ada:s3cret"),
    ],
)
def test_an_address_is_split_into_what_may_be_shown_and_what_may_not(
    text: str, shown: str, query: str, login: str
) -> None:
    address = parse_address(text)
    assert (str(address), address.query, address.login) == (shown, query, login)
    assert "s3" not in texts_of(address) and "cret" not in texts_of(address)


@pytest.mark.parametrize(
    "text",
    [
        *("", "s3cret", "host:9090", "file:///etc/s3cret", "ftp://ada:s3cret@host", "ada:s3cret@host:9090"),
        *("http://", "http://:80", "http://ada:s3cret", "http://ada:s3cret@", "http://ada:s3cret@host:s3cret"),
        *("http://ada:s3/cret@host", "http://ada:12/s3cret@host", "http://ada:s3?cret@host", "http://ada:s3#cret@host"),
        *("http://host/ s3cret", "http://host\ns3cret", "http://s3cret\x1b[2J", "http://[s3cret", "http://host:0"),
    ],
)
def test_the_error_of_a_wrong_address_repeats_no_part_of_it(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_address(text)
    assert str(caught.value) in (FORM, "an @ after the host: write @ as %40, / as %2F, ? as %3F and # as %23")


@given(st.text(st.characters(codec="utf-8"), min_size=6, max_size=20), st.booleans())
@example("12/345678", False)
@example("pass@word", False)
def test_a_password_is_in_no_text_even_if_it_is_badly_written(password: str, is_quoted: bool) -> None:
    written = quote(password, safe="") if is_quoted else password
    try:
        address = parse_address(f"https://ada:{written}@zz.yy:1/xx")
    except ValueError as exc:
        assert not is_quoted and password not in str(exc)
    else:
        assert str(address) == "https://zz.yy:1/xx"
        assert address.login == f"ada:{written}"


def test_a_page_keeps_the_login_and_the_query_of_the_address() -> None:
    address = parse_address("http://ada:s3cret@host/p/?token=x")
    assert address.page("/api") == Address("http://host/p/api", "token=x", "ada:s3cret")
    assert address.page("/api", "a=1").query == "token=x&a=1"
    assert address.at("/status") == Address("http://host/status", "", "ada:s3cret")
    assert parse_address("host:1", scheme="http") == Address("http://host:1")


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("gpu-1", ["gpu-1"]),
        ("gpu-[08-10]", ["gpu-08", "gpu-09", "gpu-10"]),
        ("gpu-[1-2]:9837,login", ["gpu-1:9837", "gpu-2:9837", "login"]),
        ("https://r[1-2]n[1-2].example.org/x[1-2]?a=b,c", [f"https://{n}.example.org/x[1-2]?a=b,c" for n in ("r1n1", "r1n2", "r2n1", "r2n2")]),
        ("127.0.0.1:[9836-9837]", ["127.0.0.1:9836", "127.0.0.1:9837"]),
        ("http://[::1]:9836", ["http://[::1]:9836"]),
        ("http://ada:s[1-2]@host", ["http://ada:s[1-2]@host"]),
        ("", [""]),
    ],
)  # fmt: skip
def test_a_host_list_is_as_many_addresses(text: str, texts: list[str]) -> None:
    assert expand_hosts(text) == texts


@pytest.mark.parametrize("text", ["gpu-[1-s3cret]", "http://s3cret[1", "gpu-[9-1]", "gpu-[0-99999999]"])
def test_the_error_of_a_wrong_host_list_repeats_no_part_of_it(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        expand_hosts(text)
    assert str(caught.value) == "expected HOST, or a list of hosts such as gpu-[01-40]"
