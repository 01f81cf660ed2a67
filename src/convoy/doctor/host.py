"""placeholder until the real one comes"""

from dataclasses import dataclass


@dataclass(frozen=True)
class OtherProcess:
    name: str
    pid: int
    cores: float


@dataclass(frozen=True)
class HostLoad:
    wall_s: float = 0.0
    waited_s: float = 0.0
    throttled_s: float = 0.0
    cores: float = 1.0
    others: tuple[OtherProcess, ...] = ()
    swapped_bytes: int = 0
    memory_pressure_s: float = 0.0


class HostWatch:
    def __init__(self, device=None):
        pass

    def read(self):
        return HostLoad()
