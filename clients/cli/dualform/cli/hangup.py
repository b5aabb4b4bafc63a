"""SIGHUP to `dualform serve` waits until the server can take it, from the first line on.

What it does by default is to kill, and supervisors send it to read a configuration again, also
while Python still imports. Imported before everything else.
"""

from __future__ import annotations

import os
import signal
import sys

# What Python calls the program: the script, `python -m dualform.cli` before and after it is found.
_OURS = ("dualform", "-m", "__main__.py")

if sys.argv[1:2] == ["serve"] and os.path.basename(sys.argv[0]) in _OURS:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
