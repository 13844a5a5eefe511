"""Create a user in MLflow, on the server: `infra/run mlflow-user [NAME]`.

Without a name: the workstations' user, with the password of workstation.env. With a name: a person's user,
with a new password, which is printed once, and the role `team`, which reads all experiments and registered
models.
"""

import base64
import json
import os
import secrets
import sys
import urllib.error
import urllib.request
from typing import Any

TEAM = "team"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - where a server may listen, not this program
READABLE = ("experiment", "registered_model")


class Refused(Exception):
    """MLflow answered a request with an error, or did not answer."""


def ask(method: str, path: str, values: dict[str, Any]) -> Any:
    """Send a request to MLflow's server as its administrator; return the answer. Raises Refused."""
    host = os.environ["DPHYBRID_MLFLOW_HOST"]
    # A server that listens everywhere is not reached at that address, but at 127.0.0.1.
    host = "127.0.0.1" if host == EVERYWHERE else host
    url = f"http://{host}:{os.environ['DPHYBRID_MLFLOW_PORT']}/api/{path}"
    admin = f"admin:{os.environ['MLFLOW_AUTH_ADMIN_PASSWORD']}".encode()
    headers = {
        "Authorization": f"Basic {base64.b64encode(admin).decode()}",
        "Content-Type": "application/json",
    }
    try:
        page = json.dumps(values).encode()
        wanted = urllib.request.Request(url, page, headers, method=method)
        with urllib.request.urlopen(wanted, timeout=30) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        raise Refused(f"{error.code} {error.read().decode(errors='replace')[:300]}") from error
    except OSError as error:
        raise Refused(f"MLflow does not answer at {url} ({error}); start dphybrid-mlflow first") from error


def make_user(name: str, password: str) -> str:
    """Create a user, or set the password of an existing one; return which of the two, as words to print."""
    try:
        ask("POST", "2.0/mlflow/users/create", {"username": name, "password": password})
    except Refused as error:
        if "RESOURCE_ALREADY_EXISTS" not in str(error):
            raise
        ask("PATCH", "2.0/mlflow/users/update-password", {"username": name, "password": password})
        return "exists, its password is set"
    return "created"


def team_role() -> int:
    """Return the id of the role that reads everything; create the role if it does not exist."""
    page = {"name": TEAM, "workspace": "default", "description": "Reads all experiments and models."}
    try:
        role = ask("POST", "3.0/mlflow/roles/create", page)["role"]["id"]
    except Refused as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        roles = ask("GET", "3.0/mlflow/roles/list?workspace=default", {})["roles"]
        return int(next(role["id"] for role in roles if role["name"] == TEAM))
    for kind in READABLE:
        given = {"role_id": role, "resource_type": kind, "resource_pattern": "*", "permission": "READ"}
        ask("POST", "3.0/mlflow/roles/permissions/add", given)
    return int(role)


def main(names: list[str]) -> int:
    """Create the users; return the exit code."""
    try:
        if not names:
            name, password = os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]
            print(f"MLflow user {name}: {make_user(name, password)} (its password is in workstation.env)")
        for name in names:
            password = secrets.token_urlsafe(12)
            print(f"MLflow user {name}: {make_user(name, password)}; password {password}")
            try:
                ask("POST", "3.0/mlflow/roles/assign", {"username": name, "role_id": team_role()})
            except Refused as error:
                # A user that exists may have the role already.
                if "ALREADY_EXISTS" not in str(error):
                    raise
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
