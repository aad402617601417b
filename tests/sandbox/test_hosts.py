"""`HostList`: what an entry is, which hosts a list has, and which addresses these may have."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.addresses import PRIVATE, PUBLIC, PUBLIC_6

from gym_serve.sandbox.hosts import HostList, host_entry, is_public


@pytest.mark.parametrize("address", PRIVATE)
def test_what_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", PUBLIC_6, "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_what_is_public(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_a_mapped_address_is_judged_as_the_one_it_maps(address: ipaddress.IPv4Address) -> None:
    assert is_public(f"::ffff:{address}") == is_public(str(address))
    assert not is_public(str(address)) or address.is_global


@given(st.text(max_size=20))
def test_what_is_no_address_is_not_public(text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        assert not is_public(text)


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        (" PyPI.org. ", "pypi.org"),
        ("*.Example.com", "*.example.com"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("192.0.2.1", "192.0.2.1"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("2001:db8::/32", "2001:db8::/32"),
    ],
)
def test_an_entry(text: str, entry: str) -> None:
    assert host_entry(text) == entry == host_entry(entry)


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "*", "*.", "**.a", "a.*", "*.10.0.0.1", "http://a", "a/b", "a:80", "[::1]", "10.0.0.1/8"),
        *(
            "a b",
            "a_b",
            "-a",
            "a-",
            "a..b",
            "bücher.example",
            "a\nb",
            "a" * 64,
            ".".join(["abc"] * 64),
            "a@b",
        ),
    ],
)
def test_what_is_no_entry(text: str) -> None:
    with pytest.raises(ValueError, match="a host must be a name"):
        host_entry(text)


def test_which_hosts_a_list_has() -> None:
    hosts = HostList(["pypi.org", "*.example.com", "192.0.2.1", "10.1.0.0/16", "fd00::/8"])
    for host in ("pypi.org", "a.example.com", "a.b.example.com", "192.0.2.1", "10.1.2.3", "fd00::1"):
        assert hosts.has(host), host
    for host in (
        *("", "a.pypi.org", "pypi.org.evil.test", "xpypi.org", "example.com", "aexample.com", ".example.org"),
        *("10.2.0.1", "192.0.2.2", "93.184.216.34", "::1", "127.0.0.1", "localhost", "0x0a.1.2.3"),
    ):
        assert not hosts.has(host), host
    assert hosts.has("::ffff:10.1.2.3")  # another notation of the same


@pytest.mark.parametrize("address", PRIVATE)
def test_a_name_has_no_private_address_but_those_of_the_list(address: str) -> None:
    assert not HostList(["pypi.org"]).admits(address)
    assert HostList(["pypi.org", host_entry(address)]).admits(address)


@given(st.text(max_size=30))
def test_any_text_is_an_entry_or_is_refused(text: str) -> None:
    try:
        entry = host_entry(text)
    except ValueError:
        return
    assert host_entry(entry) == entry
    assert entry.startswith("*.") or HostList([entry]).has(entry.partition("/")[0])
