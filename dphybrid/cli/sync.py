"""Send MLflow the records of runs that it has missed, and end runs whose process died.

Training never waits for MLflow: its record is in the run's folder (record.jsonl). Run this when the server is
back. Repeating it is safe, also while trainings run. If a retraining died before it had compared its model
with the champion, the models are compared now. The exit code is 1 when MLflow still lacks a part of a record,
or a model could not be compared.
"""

from dphybrid.cli.parser import Command
from dphybrid.config.own_runs import own_folders, why_foreign
from dphybrid.config.settings import load_settings
from dphybrid.run.folder import own_runs, retrainings
from dphybrid.util.text import masked, printable


class Flags(Command):
    """The flags of `sync`."""

    wait: float = 60.0
    """Seconds that copying each run may take."""

    def run(self) -> int:
        """Copy what waits; return 1 when MLflow still lacks something, else 0."""
        from dphybrid.tracking.record import destination
        from dphybrid.tracking.sync import sync

        settings, arrived = load_settings(), list[bool]()
        own = own_folders(settings)
        for name in sorted({page.parent.name for page in settings.runs_dir.glob("*/record.jsonl")}):
            if settings.runs_dir / name not in own:
                print(printable(f"{name}: not sent: {why_foreign(name)}"), flush=True)
        for run in own_runs(settings):
            # Without MLflow, the name is the id.
            if run.page.run_id not in ("", run.folder.name) and not destination(run.folder):
                print(f"{run.folder.name}: not sent: its record no longer says where its MLflow run is")
                arrived.append(False)
        for line, is_whole in sync(own, settings.mlflow_dir, settings.mlflow_uri, self.wait):
            print(masked(line), flush=True)
            arrived.append(is_whole)
        if retrainings(settings):
            from dphybrid.lifecycle.champion import Decision  # imports torch
            from dphybrid.lifecycle.retrain import decide_all_waiting

            for run, decision in decide_all_waiting(settings):
                line = decision.text if isinstance(decision, Decision) else f"not decided: {decision}"
                print(masked(f"{run.folder.name}: {line}"))
                arrived.append(isinstance(decision, Decision))
        if not arrived:
            print("Nothing to do: MLflow has every record, and no run is left open.")
        return 0 if all(arrived) else 1
