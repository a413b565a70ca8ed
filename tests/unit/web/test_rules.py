from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.web.chromium.rules import NavigationRules, literal

RULES = NavigationRules(frozenset({"http://127.0.0.1:8123"}))

REFUSED = [
    "file:///etc/passwd", "chrome://version", "view-source:http://a.example", "data:text/html,x", "javascript:alert(1)",
    "about:config", "devtools://x", "ftp://a.example", "ws://a.example", "blob:http://a.example/1", "", "//a.example",
    "http://", "http://a.example:99999", "http://localhost", "http://localhost.", "http://LOCALHOST:80", "http://a.localhost",
    "http://127.0.0.1", "http://127.0.0.1:8124", "http://127.1", "http://2130706433", "http://0x7f000001", "http://0177.0.0.1",
    "http://0x7f.1", "http://0", "http://0.0.0.0:80", "http://[::1]", "http://[::]", "http://[::ffff:127.0.0.1]",
    "http://[::ffff:7f00:1]", "http://[64:ff9b::7f00:1]", "http://[2002:7f00:1::]", "http://10.1.2.3", "http://172.16.0.1",
    "http://192.168.1.1", "http://100.64.0.1", "http://169.254.169.254/latest/meta-data", "http://[fe80::1]",
    "http://[fd00:ec2::254]", "http://[fc00::1]", "http://metadata.google.internal", "http://metadata", "http://printer.local",
    "http://224.0.0.1", "http://255.255.255.255", "http://192.0.2.1",
]  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
def test_these_may_not_be_opened(url: str) -> None:
    assert RULES.refused_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example",
        "https://a.example:8443/x?y#z",
        "http://93.184.215.14",
        "http://127.0.0.1:8123/page",
        "about:blank",
    ],
)
def test_these_may_be_opened(url: str) -> None:
    assert RULES.refused_url(url) is None


@pytest.mark.parametrize(
    "url",
    ["http://169.254.169.254", "http://metadata.google.internal", "http://[fd00:ec2::254]", "http://[::ffff:169.254.169.254]",
     "http://2852039166", "http://100.100.100.200"],
)  # fmt: skip
def test_no_setting_lets_a_browser_reach_a_metadata_service(url: str) -> None:
    assert NavigationRules(private=True).refused_url(url)
    assert NavigationRules(private=True).refused_url("http://127.0.0.1") is None


@given(st.ip_addresses(v=4, network="127.0.0.0/8") | st.ip_addresses(v=4, network="10.0.0.0/8"))
def test_an_address_is_refused_in_whatever_form_it_is_written(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    one, two, three, four = address.packed
    forms = [
        str(address), str(number), hex(number), f"{one}.{(two << 16) | (three << 8) | four}",
        f"0{one:o}.{two}.{three}.{four}", f"{one}.{two}.{(three << 8) | four}", f"[::ffff:{address}]",
    ]  # fmt: skip
    for form in forms:
        found = literal(form)
        assert found is not None
        assert RULES.refused_url(f"http://{form}/"), form
