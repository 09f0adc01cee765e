"""Which network addresses may be called. Pure.

A name that is allowed may still lead anywhere: to this machine, into the private network, to a cloud's metadata
service. What is judged here is the address itself, and it is the one that is connected to (`sending.py`).
"""

from __future__ import annotations

import ipaddress
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

METADATA: Final = frozenset(
    map(
        ipaddress.ip_address,
        (
            *("169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192"),
            *("fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe"),
        ),
    )
)
"""Where clouds tell a machine its secrets. Some of these look like anybody's address."""

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")

_THIS_NETWORK: Final = ipaddress.IPv4Network("0.0.0.0/8")
_USED: Final = tuple(map(ipaddress.IPv6Network, ("2000::/3", "fc00::/7", "::1/128", "64:ff9b::/96")))
"""All else of IPv6 is nobody's, or was once somebody's: a network of this kind that still works may lead anywhere."""


def refusal(text: str, *, private_too: bool) -> str | None:
    """Why this address is not called; None if it may be.

    private_too: addresses of private networks and of this machine are meant. Never called: metadata services,
    link-local, multicast, reserved and unspecified addresses, and IPv6 addresses that stand for such a one.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "is no address"
    if getattr(address, "scope_id", None):
        return "is an address of one link alone"
    for one in _meant_by(address):
        if trouble := _trouble(one, private_too):
            return trouble
    return None


def _meant_by(address: Address) -> list[Address]:
    """The address, and the IPv4 addresses to which a packet to it may be sent on."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]  # the same thing in another notation
    inner: list[Address] = [address]
    if address.sixtofour is not None:
        inner.append(address.sixtofour)
    if address.teredo is not None:
        inner.extend(address.teredo)
    if address in _NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return inner


def _trouble(address: Address, private_too: bool) -> str | None:
    if address in METADATA:
        return "is a metadata service's address"
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return "is a link-local, multicast or unspecified address"
    if _is_reserved(address):
        return "is a reserved address"
    if address.is_global:
        return None
    return None if private_too else "is a private or loopback address"


def _is_reserved(address: Address) -> bool:
    """Whether it is neither anybody's in the internet nor in a private network."""
    if isinstance(address, ipaddress.IPv6Address):
        return not any(address in network for network in _USED)
    return address.is_reserved or address in _THIS_NETWORK or not (address.is_global or address.is_private)
