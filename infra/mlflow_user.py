"""Create a user in MLflow, on the server: `infra/run mlflow-user [NAME]`.

Without a name: the workstations' user, with the password of workstation.env. With a name: a person's user,
with a new password, which is printed once, and the role `team`, which reads all experiments and registered
models.
"""

import os
import secrets
import sys

from mlflow.exceptions import MlflowException
from mlflow.server.auth.client import AuthServiceClient


def make_user(client: AuthServiceClient, name: str, password: str) -> str:
    """Create a user, or set the password of an existing one; return which of the two, as words to print."""
    try:
        client.create_user(name, password)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        client.update_user_password(name, password)
        return "exists, its password is set"
    return "created"


def join_team(client: AuthServiceClient, name: str) -> None:
    """Give a user the role that reads everything; create the role if it does not exist."""
    role = next((role for role in client.list_roles("default") if role.name == "team"), None)
    if role is None:
        role = client.create_role("default", "team", "Reads all experiments and models.")
        for kind in ("experiment", "registered_model"):
            client.add_role_permission(role.id, kind, "*", "READ")
    if role.id not in {own.id for own in client.list_user_roles(name)}:
        client.assign_role(name, role.id)


def main(names: list[str]) -> int:
    """Create the users; return the exit code."""
    workstation = os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]
    os.environ["MLFLOW_TRACKING_USERNAME"] = "admin"  # for the requests below
    os.environ["MLFLOW_TRACKING_PASSWORD"] = os.environ["MLFLOW_AUTH_ADMIN_PASSWORD"]
    # A server that listens everywhere is not reached at that address.
    host = os.environ["DPHYBRID_MLFLOW_HOST"].replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - not where this listens
    client = AuthServiceClient(f"http://{host}:{os.environ['DPHYBRID_MLFLOW_PORT']}")
    try:
        if not names:
            made = make_user(client, *workstation)
            print(f"MLflow user {workstation[0]}: {made} (its password is in workstation.env)")
        for name in names:
            password = secrets.token_urlsafe(12)
            print(f"MLflow user {name}: {make_user(client, name, password)}; password {password}")
            join_team(client, name)
    except MlflowException as error:
        print(f"{error}; is dphybrid-mlflow running?", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
