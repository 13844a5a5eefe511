"""Lets `prefect deployment run train-hybrid` find the deployment by its bare name, and refuses wrong
parameters before a run is created.

Prefect's command requires FLOW/DEPLOYMENT, and its server checks only types and bounds: neither the texts in
`overrides` nor rules between fields. This start-up hook (entry-point group `prefect.plugins`, switched on in
`prefect.toml`) resolves a name without a slash to the only deployment of that name, and checks the parameters
of dphybrid's deployments before a run is created. The hook is a public interface; the client methods that it
extends are not. A version of Prefect without them is left unchanged.
"""

import sys
from pathlib import Path
from typing import Any

from prefect.plugins import register_hook

PREFECT_PLUGIN_API_REQUIRES = ">=0.1,<1"


@register_hook
def setup_environment(*, ctx: Any) -> None:  # noqa: ARG001 - the hook's signature
    """Extend two methods of Prefect's client: the look-up by name, and the creation of flow runs."""
    from prefect.client.orchestration import PrefectClient

    by_name: Any = getattr(PrefectClient, "read_deployment_by_name", None)
    create: Any = getattr(PrefectClient, "create_flow_run_from_deployment", None)
    if by_name is None or create is None or getattr(by_name, "takes_bare_names", False):
        return

    async def read_deployment_by_name(self: object, name: str) -> Any:
        return await by_name(self, name if "/" in name else await _full_name(self, name))

    async def create_flow_run_from_deployment(
        self: Any, deployment_id: Any, *, parameters: dict[str, object] | None = None, **more: Any
    ) -> Any:
        await refuse_wrong_parameters(self, deployment_id, parameters or {})
        return await create(self, deployment_id, parameters=parameters, **more)

    PrefectClient.create_flow_run_from_deployment = create_flow_run_from_deployment  # type: ignore[method-assign]
    read_deployment_by_name.takes_bare_names = True  # type: ignore[attr-defined]
    PrefectClient.read_deployment_by_name = read_deployment_by_name  # type: ignore[method-assign]


async def _full_name(client: Any, name: str) -> str:
    """Return FLOW/DEPLOYMENT for a bare deployment name. Raises ValueError when several flows have such a
    deployment."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    found = await client.read_deployments(
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[name]))
    )
    flows = sorted([(await client.read_flow(deployment.flow_id)).name for deployment in found])
    if len(flows) > 1:
        raise ValueError(
            f"deployment {name!r} exists for several flows; say which: "
            f"{', '.join(f'{flow}/{name}' for flow in flows)}"
        )
    return f"{flows[0]}/{name}" if flows else f"{name}/{name}"


async def refuse_wrong_parameters(client: Any, deployment_id: object, parameters: dict[str, object]) -> None:
    """Raise UserError for parameters of a dphybrid deployment that its flow would refuse, or that name code
    in packages that DPHYBRID_FACTORY_PACKAGES does not allow. The command `prefect` exits with its
    message."""
    from dphybrid.config.settings import load_settings
    from dphybrid.orchestration.validate import check_values
    from dphybrid.util.errors import UserError
    from dphybrid.util.importing import importing_only

    deployment = await client.read_deployment(deployment_id)
    if "dphybrid" not in deployment.tags:
        return
    try:
        # Checking imports the code that values name, and anybody with the server's password can set values.
        with importing_only(load_settings().factory_packages):
            check_values(
                {**deployment.parameters, **parameters},
                f"deployment {deployment.name}",
                deployment.entrypoint or "",
            )
    except UserError as error:
        if Path(sys.argv[0]).name == "prefect":
            raise SystemExit(f"Error creating flow run: {error}") from error
        raise
