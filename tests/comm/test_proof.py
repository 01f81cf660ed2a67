"""Ranks that gloo has connected prove to each other that they are ranks of the same run. Real processes."""

import os
import socket
import subprocess
import sys

import pytest

RANK = """
from convoy.comm.groups import Groups, temporary
from convoy.comm import backend
from convoy.comm.joining import join, leave
from convoy.plans.mesh import Mesh
join(timeout=30)
Groups(Mesh(("sample", "filter"), (1, 2))).of((1,))
with temporary():
    Groups(Mesh(("sample",), (2,))).of((0,))
leave()
assert not backend._key  # whoever meets next may know another one, or none
print("joined")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("secrets", "is_alike"), [(("a", "a"), True), (("a", "b"), False), (("a", ""), False)])
def test_who_does_not_know_the_secret_is_no_rank(secrets: tuple[str, str], is_alike: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=os.environ | shared | {"RANK": str(rank), "CONVOY_SECRET": secret},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, secret in enumerate(secrets)
    ]
    ended = [rank.communicate(timeout=60) for rank in ranks]
    assert [said for said, _ in ended] == ["joined\n" if is_alike else ""] * 2, ended
    assert any("in the place of a rank" in errors for _, errors in ended) != is_alike
