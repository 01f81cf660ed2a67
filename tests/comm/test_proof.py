"""Ranks that gloo has connected prove to each other that they are ranks of the same run. Real processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

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


ANEW = """
import os, sys
import torch, torch.distributed as dist
from convoy.comm import backend
from convoy.errors import MeetingError
rank, file = int(sys.argv[1]), sys.argv[2]
send, words = dist.all_to_all_single, []

def recorded(received, sent, group):
    words.append(sent.clone())
    send(received, sent, group=group)

for turn in "ab":
    dist.init_process_group("gloo", init_method=f"file://{file}-{turn}", rank=rank, world_size=2)
    backend.know(b"a key that somebody has written into the store again")
    if rank == 0 or turn == "a":
        dist.all_to_all_single = recorded
        try:
            backend.connect(dist.group.WORLD)
            print("a rank")
        except MeetingError:
            print("nobody")
    else:
        for sent in words:
            send(torch.empty_like(sent), sent)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_a_rank_has_once_said_proves_nothing(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", ANEW, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == [b"a rank\nnobody\n", b"a rank\n"]
