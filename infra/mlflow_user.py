"""Makes the workstations' user in MLflow, or gives it the password of workstation.env: `infra/run
mlflow-user`, on the server.

Arguments: server.env, for the address and the administrator's password; workstation.env, for the user and its
password.
"""

import base64
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path


def values(file: str) -> dict[str, str]:
    """Read an environment file."""
    return dict(re.findall(r"^([A-Z_]+)=(.*)$", Path(file).read_text(encoding="utf-8"), re.MULTILINE))


def main(server_file: str, workstation_file: str) -> int:
    """Make the user; return the exit code."""
    server, workstation = values(server_file), values(workstation_file)
    user, password = workstation["MLFLOW_TRACKING_USERNAME"], workstation["MLFLOW_TRACKING_PASSWORD"]
    admin = base64.b64encode(f"admin:{server['MLFLOW_AUTH_ADMIN_PASSWORD']}".encode()).decode()
    headers = {"Authorization": f"Basic {admin}", "Content-Type": "application/json"}
    for method, verb in (("POST", "create"), ("PATCH", "update-password")):
        url = f"http://127.0.0.1:{server['DPHYBRID_MLFLOW_PORT']}/api/2.0/mlflow/users/{verb}"
        page = json.dumps({"username": user, "password": password}).encode()
        try:
            urllib.request.urlopen(
                urllib.request.Request(url, page, headers, method=method), timeout=30
            ).read()
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")
            if verb == "create" and "RESOURCE_ALREADY_EXISTS" in answer:
                continue
            print(f"MLflow user {user}: {error.code} {answer[:300]}", file=sys.stderr)
            return 1
        except OSError as error:
            print(f"MLflow does not answer at {url} ({error}); start dphybrid-mlflow first", file=sys.stderr)
            return 1
        print(
            f"MLflow user {user}: "
            f"{'made' if verb == 'create' else 'there, with the password of workstation.env'}"
        )
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
