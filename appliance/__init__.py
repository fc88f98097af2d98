"""The appliance: settings, command line, API and workers that compose `vision`, `queues` and `vlm_engine`."""

__version__ = "0.1.0"
