"""The first pod finds that it is the first before the cluster's name service says so."""

import socket

import pytest

from convoy import interfaces


def test_a_name_that_is_not_published_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def unpublished(host: str, *args: object, **kwargs: object) -> list:
        if "." in host and host != "127.0.0.1":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1" if host == "lenet-0" else host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", unpublished)
    monkeypatch.setattr(socket, "gethostname", lambda: "lenet-0")
    assert interfaces.is_own("lenet-0.lenet")
    monkeypatch.setattr(socket, "gethostname", lambda: "lenet-1")
    assert not interfaces.is_own("lenet-0.lenet")
