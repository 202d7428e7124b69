"""`evsys_sdk.dashboard_client`: an import path of the published documents; the code is in `record/dashboard/`."""

from evsys_sdk.record.dashboard.client import DashboardClient, ExperimentRun

__all__ = ["DashboardClient", "ExperimentRun"]
