"""Create users in MLflow, on the server: `infra/run mlflow-user [NAME]...`.

Without a name: the workstations' user, with the password of workstation.env. With names: people, each with a
new password, which is printed once, and the role `team`, which reads all experiments and registered models.
"""

import os
import secrets
import sys

from mlflow.exceptions import MlflowException
from mlflow.server.auth.client import AuthServiceClient

given, names = os.environ.copy(), sys.argv[1:]
os.environ["MLFLOW_TRACKING_USERNAME"] = "admin"  # for the requests below
os.environ["MLFLOW_TRACKING_PASSWORD"] = given["MLFLOW_AUTH_ADMIN_PASSWORD"]
# A server that listens everywhere is not reached at that address.
host = given["DPHYBRID_MLFLOW_HOST"].replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - not where this listens
client = AuthServiceClient(f"http://{host}:{given['DPHYBRID_MLFLOW_PORT']}")
users = {name: secrets.token_urlsafe(12) for name in names}
try:
    for name, password in (
        users or {given["MLFLOW_TRACKING_USERNAME"]: given["MLFLOW_TRACKING_PASSWORD"]}
    ).items():
        told = f"password {password}" if names else "its password is in workstation.env"
        try:
            client.create_user(name, password)
            print(f"MLflow user {name}: created; {told}")
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            client.update_user_password(name, password)
            print(f"MLflow user {name}: exists, its password is set; {told}")
    if names:
        team = next((role for role in client.list_roles("default") if role.name == "team"), None)
        if team is None:
            team = client.create_role("default", "team", "Reads all experiments and models.")
            for kind in ("experiment", "registered_model"):
                client.add_role_permission(team.id, kind, "*", "READ")
        for name in names:
            if team.id not in {own.id for own in client.list_user_roles(name)}:
                client.assign_role(name, team.id)
except MlflowException as error:
    sys.exit(f"{error}; is dphybrid-mlflow running?")
