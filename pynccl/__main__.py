"""``python -m pynccl``: the same as the ``pynccl`` command."""

from .cli import main

raise SystemExit(main())
