"""Hand manifests to a cluster through kubectl."""

from __future__ import annotations

import shutil
import subprocess

from anabatic.core.errors import ConfigError, Failure


def submit_manifests(text: str, context: str = "") -> str:
    """Create what the manifests describe and return what kubectl says.

    The API server is asked first whether it would take everything (`--dry-run=server`, which runs its schemas and
    admission webhooks), so that nothing is created when a part is refused.

    Args:
        context: of the kubeconfig; empty: the current one.

    Raises:
        ConfigError: there is no kubectl here.
        Failure: the cluster refuses, or is not reached.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise ConfigError("there is no kubectl on the PATH", "leave --submit out, and apply the manifest elsewhere")
    words = [program, *([f"--context={context}"] if context else []), "create", "-f", "-"]
    _run_kubectl([*words, "--dry-run=server"], text)
    return _run_kubectl(words, text)


def _run_kubectl(words: list[str], text: str) -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split())[:600]
        hint = next((hint for word, hint in _ERROR_HINTS if word in said), "look at the manifest: leave --submit out")
        raise Failure(f"kubectl refuses with exit code {done.returncode}: {said}", hint)
    return done.stdout.strip()


_ERROR_HINTS = (
    ("AlreadyExists", "another --name, or `kubectl delete` of the job and its ConfigMap"),
    ("no matches for kind", "install the operator on the cluster (Volcano or Kubeflow's training operator), or choose"
                            " the other --kind"),
    ("connect", "check `kubectl cluster-info` and --context"),
    ("orbidden", "ask for the right to create jobs and ConfigMaps in this --namespace"),
)  # fmt: skip
