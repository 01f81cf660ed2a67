"""What Kubernetes takes for a name, a variable, an image or an amount, and sentences for what it does not."""

import re
from decimal import Decimal

from convoy.errors import ConvoyError

LONGEST_NAME = 63
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_IMAGE = re.compile(
    r"(?:[a-zA-Z0-9](?:[-a-zA-Z0-9.]*[a-zA-Z0-9])?(?::[0-9]+)?/)?"  # registry
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"  # path
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"  # tag, digest
)
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_UNITS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGT", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGT", 1)},
}


def check_label(option: str, name: str, longest: int = LONGEST_NAME) -> str:
    """A DNS label (RFC 1035), as names of jobs and services are; gives it back.

    Raises:
        ConvoyError: it is none, or longer than `longest`.
    """
    if not _LABEL.fullmatch(name):
        raise ConvoyError(
            f"{option} {name!r} is no name for Kubernetes: use small letters, digits and '-', beginning with a letter "
            "and ending with a letter or a digit"
        )
    if len(name) > longest:
        raise ConvoyError(f"{option} {name!r} has {len(name)} characters: use at most {longest}")
    return name


def check_subdomain(option: str, name: str) -> str:
    """A DNS subdomain (RFC 1123), as names of claims, secrets and runtimes are; gives it back.

    Raises:
        ConvoyError: it is none.
    """
    if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
        raise ConvoyError(
            f"{option} {name!r} is no name for Kubernetes: use small letters, digits, '-' and '.', beginning and "
            "ending with a letter or a digit"
        )
    return name


def label_of(text: str) -> str:
    """A DNS label that resembles a text: `timm:ViT_B` becomes `timm-vit-b`."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return label if label[:1].isalpha() else f"convoy-{label}".strip("-")


def check_variable(option: str, name: str) -> str:
    """The name of an environment variable; gives it back.

    Raises:
        ConvoyError: it is none.
    """
    if not _VARIABLE.fullmatch(name):
        raise ConvoyError(
            f"{option} {name!r} is no name of a variable: use letters, digits and '_', beginning with no digit"
        )
    return name


def check_secret_key(option: str, key: str) -> str:
    """A key in a Secret; gives it back.

    Raises:
        ConvoyError: it is none.
    """
    if not _SECRET_KEY.fullmatch(key) or len(key) > 253:
        raise ConvoyError(f"{option} {key!r} is no key of a Secret: use letters, digits, '-', '_' and '.'")
    return key


def check_image(option: str, image: str) -> str:
    """A reference to a container image, `registry:port/path:tag@digest`; gives it back.

    Raises:
        ConvoyError: it is none.
    """
    if not _IMAGE.fullmatch(image) or len(image) > 500:
        raise ConvoyError(f"{option} {image!r} is no image: write it like registry.example/team/convoy:1.0")
    return image


def check_resource(option: str, resource: str) -> str:
    """An extended resource such as `nvidia.com/gpu`; gives it back.

    Raises:
        ConvoyError: it is none.
    """
    if not _RESOURCE.fullmatch(resource):
        raise ConvoyError(f"{option} {resource!r} is no resource: write it like nvidia.com/gpu, or none for CPUs")
    return resource


def amount(option: str, text: str) -> Decimal:
    """What an amount of CPUs or bytes says: `500m` is a half, `2Gi` is 2 · 1024³.

    Raises:
        ConvoyError: it is no amount, or zero.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None or not Decimal(match[1]):
        raise ConvoyError(f"{option} {text!r} is no amount: write CPUs like 8 or 500m, and memory like 32Gi")
    return Decimal(match[1]) * _UNITS[match[2] or ""]
