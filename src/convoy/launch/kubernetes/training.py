"""What a training on Kubernetes needs to be told."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from convoy.errors import ConvoyError
from convoy.launch.kubernetes import names
from convoy.launch.kubernetes.secrecy import check_arguments, check_not_secret

DATA_PATH, RUN_PATH = "/data", "/runs"
"""Where the claims are mounted."""
_RESERVED = ("PET_", "TORCHELASTIC_", "CONVOY_LAUNCH", "KUBERNETES_")
_OWN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "HOME"}


@dataclass(frozen=True)
class SecretVariable:
    """An environment variable whose value stays in a Secret."""

    name: str
    secret: str
    key: str

    def __post_init__(self) -> None:
        names.check_variable("--env-from-secret", self.name)
        names.check_subdomain("--env-from-secret", self.secret)
        names.check_secret_key("--env-from-secret", self.key)


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training: what to run, on what, with which volumes. Checked when it is made.

    Attributes:
        name: of the job, and of its run.
        image: with Convoy in it.
        arguments: of `convoy train`.
        num_nodes: pods.
        devices_per_node: ranks in each.
        least_nodes: pods with which the run begins and goes on while others are away; None means all.
        accelerator: the resource that a device is; None for CPUs.
        cpu: CPUs of a pod.
        memory: bytes of a pod, shared memory included.
        shared_memory: bytes of its /dev/shm.
        run_claim: the PersistentVolumeClaim for runs, mounted at `/runs`.
        data_claim: the PersistentVolumeClaim with the data, mounted at `/data` for reading.
        namespace: None leaves it to `kubectl`.
        environment: variables with their values.
        secrets: variables whose values are in Secrets.
        max_restarts: how often the ranks of a pod are started again before the pod fails, and how often a pod is.
        user: the user and group that the processes are; not 0, which is root.

    Raises:
        ConvoyError: names the option that is wrong.
    """

    name: str
    image: str
    arguments: tuple[str, ...]
    num_nodes: int
    devices_per_node: int
    run_claim: str
    cpu: str
    memory: str
    shared_memory: str
    data_claim: str | None = None
    least_nodes: int | None = None
    accelerator: str | None = "nvidia.com/gpu"
    namespace: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[SecretVariable, ...] = ()
    max_restarts: int = 3
    user: int = 1000

    def __post_init__(self) -> None:
        names.check_label("--name", self.name, names.LONGEST_NAME - len(f"-node-0-{self.num_nodes - 1}"))
        names.check_image("--image", self.image)
        names.check_subdomain("--run-claim", self.run_claim)
        if self.data_claim is not None:
            names.check_subdomain("--data-claim", self.data_claim)
        if self.namespace is not None:
            names.check_label("--namespace", self.namespace)
        if self.accelerator is not None:
            names.check_resource("--accelerator", self.accelerator)
        for option, value, least in (
            ("--nodes", self.num_nodes, 1),
            ("--devices-per-node", self.devices_per_node, 1),
            ("--max-restarts", self.max_restarts, 0),
            ("--user", self.user, 1),
        ):
            if value < least:
                why = ", since 0 is root" if option == "--user" else ""
                raise ConvoyError(f"{option} {value} must be at least {least}{why}")
        if self.least_nodes is not None and not 1 <= self.least_nodes <= self.num_nodes:
            raise ConvoyError(f"--min-nodes {self.least_nodes} must be between 1 and --nodes {self.num_nodes}")
        names.amount("--cpu", self.cpu)
        if names.amount("--shared-memory", self.shared_memory) > names.amount("--memory", self.memory):
            raise ConvoyError(
                f"--shared-memory {self.shared_memory} is part of --memory {self.memory}, and cannot be more: raise "
                "--memory"
            )
        self._check_environment()
        self._check_arguments()

    @property
    def num_devices(self) -> int:
        """Ranks of the whole job."""
        return self.num_nodes * self.devices_per_node

    def _check_environment(self) -> None:
        secret = [variable.name for variable in self.secrets]
        for name in [*self.environment, *secret]:
            names.check_variable("--env", name)
            if name in _OWN or name.startswith(_RESERVED):
                raise ConvoyError(f"--env {name} is set by the launcher: leave it away")
        for name, value in self.environment.items():
            check_not_secret("--env", name, value)
            _check_text(f"--env {name}", value)
        twice = [name for name in secret if secret.count(name) > 1 or name in self.environment]
        if twice:
            raise ConvoyError(f"the variable {twice[0]} is given twice: leave one away")

    def _check_arguments(self) -> None:
        for argument in self.arguments:
            _check_text("an argument after --", argument)
        check_arguments(self.arguments)


def _check_text(what: str, text: str) -> None:
    """Refuse what YAML or a process cannot be given.

    Raises:
        ConvoyError: the text is not UTF-8, or has a zero byte.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConvoyError(f"{what} is not text in UTF-8 ({text!a}): rename it") from None
    if "\0" in text:
        raise ConvoyError(f"{what} has a zero byte in it: leave it away")
