"""`HostList`: the hosts that a box may reach, by name, address or network."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address

_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*"
)
_SPECIAL_4 = (
    IPv4Network("192.0.0.0/24"),  # protocols; a cloud has its metadata there
    IPv4Network("192.88.99.0/24"),  # 6to4 relays
    IPv4Network("168.63.129.16/32"),  # Azure's platform service has a public address
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_SPECIAL_6 = (
    IPv6Network("2001::/23"),  # protocols; Teredo
    IPv6Network("2002::/16"),  # 6to4
    IPv6Network("3fff::/20"),  # documentation
)
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether a host on the public internet answers at ``address``; False if it is not an address."""
    parsed = address_of(address)
    if parsed is None:
        return False
    if isinstance(parsed, IPv6Address):
        special = any(parsed in network for network in _SPECIAL_6)
        return parsed in _GLOBAL_UNICAST and parsed.is_global and not special
    special = any(parsed in network for network in _SPECIAL_4)
    return parsed.is_global and not parsed.is_multicast and not special


def address_of(text: str) -> Address | None:
    """The address that a text is, of version 4 if it is one of these in version 6; None if it is none."""
    try:
        parsed = ip_address(text)
    except ValueError:
        return None
    if isinstance(parsed, IPv6Address):
        embedded = IPv4Address(int(parsed) & 0xFFFFFFFF) if parsed in _NAT64 else parsed.ipv4_mapped
        return embedded or parsed
    return parsed


def host_entry(text: str) -> str:
    """An entry of a `HostList` as it is compared: a name, ``*.`` before a name (all names below it), an
    address, or a network (``10.0.0.0/8``). Raises ValueError: it is none of these, such as a URL."""
    entry = text.strip().lower().rstrip(".")
    if (address := address_of(entry)) is not None:
        return str(address)
    try:
        return str(ip_network(entry))
    except ValueError:
        name = entry.removeprefix("*.")
        if not _NAME.fullmatch(name) or (name != entry and address_of(name) is not None):
            raise ValueError(
                f"a host must be a name, *.NAME, an address or a network, got {text!r}"
            ) from None
        return entry


class HostList:
    """Hosts that may be reached; ``entries`` as `host_entry` makes them.

    A name may have public addresses only, but for those that the list has itself: whoever answers for a name
    could else lead into the network of this machine.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        self._names: set[str] = set()
        self._above: list[str] = []
        for entry in entries:
            try:
                self._networks.append(ip_network(entry))
            except ValueError:
                if entry.startswith("*."):
                    self._above.append(entry[1:])
                else:
                    self._names.add(entry)

    def has(self, host: str) -> bool:
        """Whether a host, a name or an address in lower case, is in the list."""
        address = address_of(host)
        if address is not None:
            return any(address in network for network in self._networks)
        return host in self._names or any(host.endswith(above) for above in self._above)

    def admits(self, address: str) -> bool:
        """Whether a name that is in the list may have this address."""
        return is_public(address) or self.has(address)
