"""Prefect's clients for threads that look after a flow run."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import SettingsContext, get_settings_context


def client_for_threads() -> Callable[[], AbstractContextManager[SyncPrefectClient]]:
    """Return what opens a client in any thread, of the server that this thread has.

    A thread has none of its starter's settings, and without the address of a temporary server a client would
    start another one. It is a new client each time: one that has been connected retries for a minute when the
    server is away.
    """
    here = get_settings_context()

    @contextmanager
    def opened() -> Iterator[SyncPrefectClient]:
        with (
            SettingsContext(profile=here.profile, settings=here.settings),
            get_client(sync_client=True) as client,
        ):
            yield client

    return opened
