"""The processes of a run and the machine under them: environment, process group, device, seeds."""
