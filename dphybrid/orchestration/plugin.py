"""Lets `prefect deployment run train-hybrid` find the deployment by its bare name.

Prefect's command requires FLOW/DEPLOYMENT. This start-up hook (entry-point group `prefect.plugins`, switched
on in `prefect.toml`) resolves a name without a slash to the only deployment of that name. The hook is a
public interface; the client method that it extends is not. A version of Prefect without it is left unchanged.
"""

from typing import Any

from prefect.plugins import register_hook

PREFECT_PLUGIN_API_REQUIRES = ">=0.1,<1"


@register_hook
def setup_environment(*, ctx: Any) -> None:  # noqa: ARG001 - the hook's signature
    """Extend the look-up by name of Prefect's client."""
    from prefect.client.orchestration import PrefectClient

    by_name: Any = getattr(PrefectClient, "read_deployment_by_name", None)
    if by_name is None or getattr(by_name, "takes_bare_names", False):
        return

    async def read_deployment_by_name(self: object, name: str) -> Any:
        return await by_name(self, name if "/" in name else await _full_name(self, name))

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
