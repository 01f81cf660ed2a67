"""Manifests for Kubernetes: a Kubeflow TrainJob, or an indexed Job with a headless Service.

Each starts torch's elastic launcher in every pod; nothing here talks to a cluster.
"""

from convoy.launch.kubernetes.manifests import KINDS, to_yaml
from convoy.launch.kubernetes.training import SecretVariable, Training

__all__ = ["KINDS", "SecretVariable", "Training", "to_yaml"]
