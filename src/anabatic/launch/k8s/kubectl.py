"""Submit manifests to a cluster through kubectl."""

from __future__ import annotations

import shutil
import subprocess

from anabatic.core.errors import ConfigError, Failure


def submit_manifests(text: str, context: str = "") -> str:
    """Create the objects of the manifests and return kubectl's output.

    A dry run on the API server comes first (`--dry-run=server`, which runs its schemas and admission webhooks), so
    that nothing is created when one object is refused.

    Args:
        context: context of the kubeconfig; empty: the current one.

    Raises:
        ConfigError: there is no kubectl here.
        Failure: the cluster refuses, or cannot be reached.
    """
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise ConfigError("there is no kubectl on the PATH", "leave --submit out, and apply the manifest elsewhere")
    command = [kubectl, *([f"--context={context}"] if context else []), "create", "-f", "-"]
    _run_kubectl([*command, "--dry-run=server"], text)
    return _run_kubectl(command, text)


def _run_kubectl(command: list[str], text: str) -> str:
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        stderr = " ".join(result.stderr.split())[:600]
        hint = next(
            (hint for pattern, hint in _ERROR_HINTS if pattern in stderr), "look at the manifest: leave --submit out"
        )
        raise Failure(f"kubectl refuses with exit code {result.returncode}: {stderr}", hint)
    return result.stdout.strip()


_ERROR_HINTS = (
    ("AlreadyExists", "another --name, or `kubectl delete` of the job, its ConfigMap and its Secret"),
    ("no matches for kind", "install the operator on the cluster (Volcano, MindCluster, JobSet, Kubeflow's training"
                            " operator or trainer), or choose another --kind"),
    ("connect", "check `kubectl cluster-info` and --context"),
    ("orbidden", "ask for the right to create jobs, ConfigMaps and Secrets in this --namespace"),
)  # fmt: skip
