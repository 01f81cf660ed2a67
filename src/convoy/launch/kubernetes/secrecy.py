"""What must not stand in a manifest, which is kept in repositories and read by many."""

import re

from convoy.errors import ConvoyError

_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|(?:KEYS?|_PWD|_PAT|_AUTH)$")
_VALUE = re.compile(
    r"://[^/@\s]*:[^/@\s]+@"  # https://user:password@host
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(?:hf_[A-Za-z0-9]{20,}|gh[opsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{20,})"
)


def check_not_secret(option: str, name: str, value: str) -> None:
    """Refuse a variable that by its name or its value holds a secret.

    Raises:
        ConvoyError: it does; the value is not repeated.
    """
    if _NAME.search(name.upper()) or _VALUE.search(value):
        raise ConvoyError(
            f"{option} {name} looks like a secret, and a manifest is no place for one: put it into a Kubernetes "
            f"Secret and give --env-from-secret {name}=SECRET/KEY"
        )


def check_arguments(arguments: tuple[str, ...]) -> None:
    """Refuse an argument for `convoy train` that holds a secret.

    Raises:
        ConvoyError: it does; the argument is not repeated.
    """
    for number, argument in enumerate(arguments, 1):
        if _VALUE.search(argument):
            raise ConvoyError(
                f"argument {number} after -- looks like it holds a password or a token, and a manifest is no place for "
                "one: mount the data as a claim, or give the secret by --env-from-secret"
            )
