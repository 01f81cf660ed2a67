"""How ranks meet: torchrun's variables, one backend that all choose, groups over axes, and proof of who they are."""

import os
import socket
from datetime import timedelta
from unittest import mock

import pytest
import torch

from convoy.comm import joining
from convoy.comm.groups import Groups, temporary
from convoy.comm.joining import GLOO, NCCL, RankDevice, generation_store, join, leave, open_store
from convoy.errors import ConvoyError, MachineError, MeetingError
from convoy.plans.mesh import Mesh
from ranks import run_ranks

LIMIT = timedelta(seconds=30)
# By the host and the GPU of each rank: the backend, and what people should know of it.
LAYOUTS = {
    "a1 a2 a3 b4": (NCCL, ""),
    "a1 a2 b3 b3": (GLOO, "ranks 2, 3 share a GPU of host b"),
    "a1 b1": (GLOO, "ranks 0, 1 share"),  # which containers with other names share
    "a1 b-": (GLOO, "rank 1 on host b has no GPU"),
    "a- a- b-": (GLOO, ""),
}
UNLIKE = [text.split() for text in LAYOUTS if len(text.split()) == 4]


def seen(text: str) -> RankDevice:
    return RankDevice(text[0], "" if text[1:] == "-" else f"GPU-{text[1:]}")


def agree(layouts: list[list[str]]) -> list[tuple[str, str]]:
    """The backends that this rank takes, by real messages; and by what it sees itself, as it was once."""
    rank, world, backends = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    store = open_store(rank, world, LIMIT)
    for layout in layouts:
        generation = generation_store(store, rank, world, LIMIT)
        agreed = joining.agreed_backend(generation, rank, world, seen(layout[rank])).backend
        alone = joining.choose_backend([seen(other) for other in layout if other[0] == layout[rank][0]]).backend
        backends.append((agreed, alone))
        generation.add("done", 1)
        while rank == 0 and generation.add("done", 0) < world:  # it keeps the store
            pass
    return backends


def test_ranks_choose_one_backend_and_nccl_where_their_gpus_differ() -> None:
    for layout, (name, note) in LAYOUTS.items():
        choice = joining.choose_backend([seen(rank) for rank in layout.split()])
        assert choice.backend == name and ((note in choice.note) if note else not choice.note), layout
    by_rank = run_ranks(agree, 4, UNLIKE, join=False)
    for number, layout in enumerate(UNLIKE):
        assert {answers[number][0] for answers in by_rank} == {LAYOUTS[" ".join(layout)][0]}
    assert len({answers[-1][1] for answers in by_rank}) == 2, "each by itself would choose another one"


HERE = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "GLOO_SOCKET_IFNAME": "lo"}
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize(
    ("variables", "kind", "message"),
    [
        ({"RANK": "0"}, ConvoyError, r"^RANK set but not WORLD_SIZE and MASTER_ADDR and MASTER_PORT: start the ranks"),
        ({"RANK": "x", **HERE}, ConvoyError, "RANK is 'x', but must be a whole number"),
        pytest.param({"RANK": "1", **HERE}, MeetingError, r"Rank 1 cannot join .*:9 ", marks=pytest.mark.slow),
        ({"RANK": "0", **HERE}, MeetingError, "set MASTER_PORT to a free port"),
        ({"RANK": "0", **HERE, "FULL": "1"}, MachineError, "^rank 0 ran out of memory when it joined .* MiB: see"),
    ],
    ids=["incomplete", "no number", "others may come later", "port taken", "GPU full"],
)
def test_who_cannot_join_is_told_why(monkeypatch, variables, kind, message):
    """A port that is taken, as by ranks that are about to end, is no mistake that another try would not mend, and a GPU
    that is full already no matter of the network."""
    for name in [*os.environ]:
        if name in ("RANK", *HERE) or name.startswith("TORCHELASTIC"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as taken:
        if "port" in message:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        if "FULL" in variables:
            monkeypatch.setattr("convoy.comm.joining.open_store", mock.Mock(side_effect=FULL))
        with pytest.raises(kind, match=message):
            join(timeout=1)


def _meet_with(secrets: list[tuple[str, str]]) -> list[str]:
    """What becomes of this rank where the two have these secrets."""
    answers = []
    for secret in secrets:
        os.environ["CONVOY_SECRET"] = secret[int(os.environ["RANK"])]
        try:
            join(timeout=30)
            Groups(Mesh(("sample", "filter"), (1, 2))).of((1,))
            with temporary():
                Groups(Mesh(("sample",), (2,))).of((0,))
            answers.append("a rank")
        except MeetingError as error:
            assert "in the place of a rank" in str(error)
            answers.append("nobody")
        leave()
        assert not joining._key  # whoever meets next may know another one, or none
    return answers


def test_who_does_not_know_the_secret_is_no_rank() -> None:
    secrets = [("a", "a"), ("a", "b"), ("a", ""), ("", "")]
    expected = ["a rank", "nobody", "nobody", "a rank"]
    assert run_ranks(_meet_with, 2, secrets, join=False) == [expected] * 2
